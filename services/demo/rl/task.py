"""The task: a tiny model, prompts, and a rule that rewards what the model writes. Pure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 64, 4, 12
GROUPS, EACH = 8, 8
"""Prompts of a step, and answers to each, which are compared with one another."""
REWARDED = VOCABULARY // 4


def model_config() -> Any:
    """Return the configuration of the model."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


def prompts(seed: int) -> Tensor:
    """Return the prompts of a step, (GROUPS * EACH, PROMPT_TOKENS) int64: those of a group are the same."""
    dice = torch.Generator().manual_seed(seed)
    one = torch.randint(VOCABULARY, (GROUPS, PROMPT_TOKENS), generator=dice)
    return one.repeat_interleave(EACH, dim=0)


def rewards(tokens: Tensor) -> Tensor:
    """Return the reward of each row, float32: which part of the answer is of the first quarter of the vocabulary."""
    return (tokens[:, PROMPT_TOKENS:] < REWARDED).float().mean(dim=1)


def advantages(reward: Tensor, each: int = EACH) -> Tensor:
    """Return by how much each answer is better than the others of its group, in deviations of the group (GRPO).

    Args:
        reward: of all answers, group by group.
        each: answers of a group.
    """
    grouped = reward.view(-1, each)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-4)).flatten()
