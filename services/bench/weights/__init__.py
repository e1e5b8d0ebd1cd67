"""Benches of `asyncfabric.weights`: updates from trainers to replicas, and the codings of weights."""
