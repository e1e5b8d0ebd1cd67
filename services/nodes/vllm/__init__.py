"""vLLM as the engine of prefill and decode nodes. vLLM is imported when a node starts, and here alone.

See docs/guide/vllm.md; what moves the blocks is `asyncfabric.integrations.vllm`.
"""
