"""Runs a causal model of transformers over pages: chunked prefill and batched decode with one rule for rounding.

Blocking code whose thread the caller chooses, and a batcher that drives it from trio. See README.md.
"""
