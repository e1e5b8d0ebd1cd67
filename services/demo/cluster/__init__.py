"""`asyncfabric demo kv`: a cluster on one machine, scaled and hurt under load, each answer checked. See README.md."""
