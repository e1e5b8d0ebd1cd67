"""Benches between GPUs, beside the copies of torch."""
