"""A sparse model: a checkpoint of transformers, or a small random Mixtral. Blocking; loads for seconds.

The weights of the random model are so wide that each token of an answer depends on the whole prompt and on all experts.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig, MixtralForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncfabric.integrations.sparse_blocks import ParallelBlock, config_for
from asyncfabric_services.runner.checkpoint import checkpoint_folder
from asyncfabric_services.runner.tokenizer import BYTE_VOCABULARY
from asyncfabric_services.settings.schema import ModelSection

TOP_K = 2
INIT_SCALE = 2.5  # standard deviation times the square root of the width

_generator = threading.Lock()  # torch's generator belongs to the process


def load_sparse(section: ModelSection) -> Any:
    """Return the model of the settings in evaluation mode; raises ValueError where it has no sparse block we know."""
    if section.path is not None:
        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint_folder(section.path), dtype="auto", local_files_only=True, use_safetensors=True
        )
    else:
        config = MixtralConfig(
            vocab_size=BYTE_VOCABULARY,
            hidden_size=section.hidden,
            intermediate_size=section.hidden // 2,
            num_hidden_layers=section.layers,
            num_attention_heads=section.query_heads,
            num_key_value_heads=section.kv_heads,
            num_local_experts=section.experts,
            num_experts_per_tok=min(TOP_K, section.experts),
            max_position_embeddings=section.max_tokens,
            initializer_range=INIT_SCALE / section.hidden**0.5,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with _generator:
            torch.manual_seed(section.seed)
            model = MixtralForCausalLM(config)
    config_for(model, ranks=1, max_tokens=1)  # raises for a model without sparse blocks
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the `count` likeliest tokens after a prompt; `count` forwards. Ends of texts do not end it."""
    cache, tokens, given = DynamicCache(config=model.config), list[int](), prompt
    for _ in range(count):
        out = model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        given = [int(out.logits[0, -1].argmax())]
        tokens += given
    return tokens


@torch.inference_mode()
def attend(blocks: list[ParallelBlock], count: int) -> None:
    """Take part in `count` forwards of the other ranks without a token of our own."""
    for _ in range(count):
        for block in blocks:
            weights = block.shard.down_proj
            block(torch.empty(0, weights.shape[1], dtype=weights.dtype))


def mask_experts(model: Any, experts: range) -> None:
    """Make these experts of every layer give zeros, as if nobody held them."""
    for module in model.modules():
        if type(module).__name__.endswith("SparseMoeBlock"):
            module.experts.down_proj.data[experts.start : experts.stop] = 0.0
