"""asyncfabric.integrations: adapters to other frameworks. No logic here; import the one that is wanted.

sparse_blocks: the sparse blocks of transformers' Mixtral, Qwen2-MoE and Qwen3-MoE, expert-parallel (extra `torch`).
nixl: the Python interface of NIXL, for engines that speak it unchanged; agents over fabrics.
vllm_weights: weights from a training into vLLM, by its `WeightTransferEngine` (extra `vllm`).
vllm: a KV connector of vLLM (extra `vllm`).
ray: a tensor transport of Ray (extra `ray`).
lmcache: a transfer channel of LMCache (extra `lmcache`).
checkpoint_engine: the P2P store of checkpoint_engine (extra `checkpoint-engine`).
deep_ep: the interface of DeepEP's `Buffer`, for host and GPU tensors (extra `torch`).
"""
