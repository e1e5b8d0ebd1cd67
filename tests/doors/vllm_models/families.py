"""Tiny configurations of the families of models that rules are compared for, by the name of vLLM's class."""

from __future__ import annotations

from typing import Any

import transformers

HEADS, KV_HEADS = 8, 2
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, Any] = {
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**SMALL),
    "MistralForCausalLM": lambda: transformers.MistralConfig(**SMALL),
    "Qwen2ForCausalLM": lambda: transformers.Qwen2Config(**SMALL),
    "Qwen3ForCausalLM": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "Qwen3MoeForCausalLM": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16, num_experts=4),
    "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(**SMALL | {"tie_word_embeddings": True}, head_dim=16),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16),
    "DeepseekV3ForCausalLM": lambda: transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": HEADS},
        **EXPERTS,
        **LATENT,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
    ),
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_window_layers=2
    ),
}
