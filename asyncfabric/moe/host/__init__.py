"""The exchange in host memory, over any provider: what `asyncfabric.moe` opens. No logic.

How it works, and its invariants: docs/explain/moe.md.
"""
