"""Benches of `asyncfabric.kv`: streams of layers, and the time to the first token."""
