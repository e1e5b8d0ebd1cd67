"""A causal model that computes from the fused tensors of a replica: Llama, Qwen and Mixtral families, TP and EP. CPU.

All ranks of the replica are in this process and go side by side: where engines sum or gather over ranks, here is a sum
in the order of the ranks. Groups of `tp` ranks share everything but the experts, and each group takes its part of the
batch; experts are dealt to all ranks. Weights in float8 are multiplied with their scales when they are used. There is
no cache of keys and values: the weights may change between two tokens, and then a cache would be of no version.
Blocking; one call at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from asyncfabric.weights import SCALE_SUFFIX, ModelCard, ReplicaLayout
from asyncfabric.weights.plan.causal import card_of
from asyncfabric_services.rollout.usual import BLOCK

RankTensors = Mapping[str, Tensor]
COMPUTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


class FusedModel:
    """The computation; the tensors are given to each call, so that a version is served by whoever holds its memory.

    Args:
        config: of transformers.
        layout: of the replica.
    """

    def __init__(self, config: Any, layout: ReplicaLayout) -> None:
        refuse_uncomputable(config)
        self.card: ModelCard = card_of(config)
        self._window: int | None = getattr(config, "sliding_window", None)
        self.layout = layout
        self._config = config
        self._rotary = LlamaRotaryEmbedding(config)
        self._eps = float(config.rms_norm_eps)
        self._top = int(getattr(config, "num_experts_per_tok", 0))
        self._normed = bool(getattr(config, "norm_topk_prob", True))

    @torch.no_grad()
    def logits(self, ranks: Sequence[RankTensors], tokens: Tensor) -> Tensor:
        """Return float32 logits (batch, length, vocabulary) of token ids (batch, length).

        Args:
            ranks: the tensors of each rank, as `local_tensors` names them.
            tokens: int64.

        Raises:
            ValueError: not as many ranks as the layout has, or more tokens than the model's window.
        """
        if self._window is not None and tokens.shape[1] > self._window:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the window of {self._window}; not computed here")
        if len(ranks) != self.layout.ranks:
            raise ValueError(f"the replica has {self.layout.ranks} ranks, got tensors of {len(ranks)}")
        tp = self.layout.tp
        groups = [ranks[first : first + tp] for first in range(0, len(ranks), tp)]
        batches = torch.tensor_split(tokens, len(groups))
        states = [self._embed(group, batch) for group, batch in zip(groups, batches, strict=True)]
        turns = self._rotary(states[0], torch.arange(tokens.shape[1])[None])
        for layer in range(self.card.layers):
            root = f"model.layers.{layer}."
            for number, group in enumerate(groups):
                before = self._norm(states[number], group[0][root + "input_layernorm.weight"])
                states[number] = states[number] + self._attention(group, root + "self_attn.", before, turns)
            normed = [
                self._norm(state, group[0][root + "post_attention_layernorm.weight"])
                for state, group in zip(states, groups, strict=True)
            ]
            states = [a + b for a, b in zip(states, self._mixed(ranks, groups, root + "mlp.", normed), strict=True)]
        return torch.cat([self._head(group, state) for group, state in zip(groups, states, strict=True)])

    # ---- inside

    def _embed(self, group: Sequence[RankTensors], tokens: Tensor) -> Tensor:
        tables = [rank["model.embed_tokens.weight"] for rank in group]
        return functional.embedding(tokens, tables[0] if len(tables) == 1 else torch.cat(tables))

    def _head(self, group: Sequence[RankTensors], state: Tensor) -> Tensor:
        state = self._norm(state, group[0]["model.norm.weight"])
        tied = self._config.tie_word_embeddings and "lm_head.weight" not in group[0]
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"  # both are cut in rows
        return torch.cat([functional.linear(state, rank[head]) for rank in group], dim=-1).float()

    def _norm(self, state: Tensor, weight: Tensor) -> Tensor:
        values = state.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self._eps)
        return weight * values.to(state.dtype)

    def _attention(
        self, group: Sequence[RankTensors], root: str, state: Tensor, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        heads, width = self.card.heads // len(group), self.card.head_dim
        kept = max(1, self.card.kv_heads // len(group))
        batch, length, _ = state.shape
        total = None
        for rank in group:
            weight, bias = weight_of(rank, root + "qkv_proj.weight"), rank.get(root + "qkv_proj.bias")
            fused = functional.linear(state, weight, bias)
            parts = torch.split(fused, [heads * width, kept * width, kept * width], dim=-1)
            query, key, value = (part.reshape(batch, length, -1, width) for part in parts)
            if root + "q_norm.weight" in rank:
                query = self._norm(query, rank[root + "q_norm.weight"])
                key = self._norm(key, rank[root + "k_norm.weight"])
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            query, key = apply_rotary_pos_emb(query, key, *turns)
            key, value = (part.repeat_interleave(heads // kept, dim=1) for part in (key, value))
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            seen = seen.transpose(1, 2).reshape(batch, length, -1)
            part = functional.linear(seen, weight_of(rank, root + "o_proj.weight"))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _mixed(
        self, ranks: Sequence[RankTensors], groups: Sequence[Sequence[RankTensors]], root: str, states: list[Tensor]
    ) -> list[Tensor]:
        if root + "gate.weight" not in ranks[0]:
            return [self._dense(group, root, state) for group, state in zip(groups, states, strict=True)]
        chosen = [
            self._routed(group[0][root + "gate.weight"], each) for group, each in zip(groups, states, strict=True)
        ]
        flat = torch.cat([state.flatten(0, 1) for state in states])
        index, share = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        each = self.card.experts // len(ranks)
        total = torch.zeros_like(flat)
        for number, rank in enumerate(ranks):
            for slot in range(each):
                tokens, place = torch.where(index == number * each + slot)
                if not len(tokens):
                    continue
                gate, up = functional.linear(flat[tokens], weight_of(rank, root + "experts.w13_weight", slot)).chunk(
                    2, dim=-1
                )
                down = weight_of(rank, root + "experts.w2_weight", slot)
                out = functional.linear(functional.silu(gate) * up, down) * share[tokens, place, None]
                total.index_add_(0, tokens, out)
        parts = torch.split(total, [state.shape[0] * state.shape[1] for state in states])
        return [part.view_as(state) for part, state in zip(parts, states, strict=True)]

    def _dense(self, group: Sequence[RankTensors], root: str, state: Tensor) -> Tensor:
        total = None
        for rank in group:
            gate, up = functional.linear(state, weight_of(rank, root + "gate_up_proj.weight")).chunk(2, dim=-1)
            part = functional.linear(functional.silu(gate) * up, weight_of(rank, root + "down_proj.weight"))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _routed(self, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (experts of each token, their shares)."""
        flat = state.flatten(0, 1)
        chance = functional.softmax(functional.linear(flat, gate), dim=-1, dtype=torch.float32)
        share, index = torch.topk(chance, self._top, dim=-1)
        if self._normed:
            share = share / share.sum(dim=-1, keepdim=True)
        return index, share.to(flat.dtype)


def refuse_uncomputable(config: Any) -> None:
    """Raise ValueError for a configuration whose model is computed in another way than here: answers would be wrong."""
    kind, function = str(getattr(config, "model_type", "")), str(getattr(config, "hidden_act", ""))
    if kind not in COMPUTED:
        raise ValueError(f"rollouts do not compute models of type {kind!r}, only {', '.join(COMPUTED)}")
    if function not in ("silu", "swish"):
        raise ValueError(f"rollouts compute silu between the matrices of a layer, not {function!r}")


def weight_of(rank: RankTensors, name: str, slot: int | None = None) -> Tensor:
    """Return a matrix as it is multiplied with; `slot` chooses one of a stack."""
    weight = rank[name] if slot is None else rank[name][slot]
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    scales = rank[name + SCALE_SUFFIX] if slot is None else rank[name + SCALE_SUFFIX][slot]
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * spread).to(torch.bfloat16)
