"""`asyncfabric demo pair`: a prefill and a decode process move the KvCache of a real model."""
