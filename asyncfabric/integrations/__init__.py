"""asyncfabric.integrations: adapters to other frameworks. No logic here; import the one that is wanted.

sparse_blocks: the sparse blocks of transformers' Mixtral, Qwen2-MoE and Qwen3-MoE, expert-parallel (extra `torch`).
nixl: the Python interface of NIXL, for engines that speak it unchanged; agents over fabrics.
deep_ep: the interface of DeepEP's `Buffer`, for host tensors (extra `torch`).
"""
