"""Benches of `asyncfabric.moe`: dispatch and combine, beside gloo and NCCL."""
