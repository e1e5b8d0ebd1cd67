"""asyncfabric.kv: KvCache streaming."""
