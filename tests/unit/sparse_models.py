"""Tiny sparse models of transformers with weights so wide that answers depend on all of them; and ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import torch
from moe_fixture import ranks_of
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import asyncfabric as af
from asyncfabric.integrations.sparse_blocks import config_for
from asyncfabric.moe import MoeExchange

torch.set_num_threads(1)  # the matrices are small, and threads that wait for a shared core make it slower

KINDS = ("mixtral", "qwen2", "qwen3", "deepseek")
HIDDEN = 64
VOCABULARY = 96
TOKENS = 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 2.5 / HIDDEN**0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "experts_implementation": "eager",
}


def model_of(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a random model in evaluation mode, the same for the same arguments; it has 6 or 10 experts."""
    qwen = {"num_experts": 10, "moe_intermediate_size": 48, "intermediate_size": 96}
    config: Any
    torch.manual_seed(5)
    if kind == "mixtral":
        config = MixtralConfig(**SHAPE | {"num_local_experts": 6, "intermediate_size": 80} | options)
        model: Any = MixtralForCausalLM(config)
    elif kind == "qwen2":
        more = {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "num_experts_per_tok": 4}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE | qwen | more | options))
    elif kind == "deepseek":
        shape = {
            "n_routed_experts": 10,
            "moe_intermediate_size": 48,
            "intermediate_size": 96,
            "first_k_dense_replace": 1,
        }
        heads = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        groups = {
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 4,
        }
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE | shape | heads | groups | options))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | qwen | {"head_dim": 16, "norm_topk_prob": True} | options))
    return model.to(dtype).eval()


def prompt_of(rank: int) -> torch.Tensor:
    """Return a prompt, of another length for each rank."""
    return torch.randint(0, VOCABULARY, (1, 3 + 2 * rank), generator=torch.Generator().manual_seed(rank))


def generate(model: Any, prompt: torch.Tensor, count: int = TOKENS) -> list[int]:
    """Return the prompt and the greedy answer of transformers."""
    return model.generate(prompt, max_new_tokens=count, do_sample=False)[0].tolist()


def parallel(
    model: Any,
    ranks: int,
    body: Callable[[MoeExchange, af.Fabric], Awaitable[None]],
    backend: str = "trio",
    **options: Any,
) -> None:
    """Run `body` on each rank of an exchange for the blocks of a model."""
    config = config_for(model, ranks=ranks, max_tokens=32, **options)
    anyio.run(lambda: ranks_of(config, body), backend=backend)
