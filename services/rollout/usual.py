"""The usual way into a replica: whole tensors of a state dict, fused, cast, quantised and cut by torch.

Shares no code with plans: it is what an update without plans would do, and what theirs is compared with bit for bit.
Blocking; on any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncfabric.weights import SCALE_SUFFIX, ModelCard, ReplicaLayout

BLOCK = 128
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
EXPERTS = {"mlp.experts.gate_up_proj": "mlp.experts.w13_weight", "mlp.experts.down_proj": "mlp.experts.w2_weight"}
COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
WHOLE = ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate", "input_layernorm", "post_attention_layernorm")


def load_usual(state: Mapping[str, Tensor], card: ModelCard, layout: ReplicaLayout) -> list[dict[str, Tensor]]:
    """Return the tensors of each rank of a replica, from whole tensors on the CPU."""
    return [_rank_tensors(state, card, layout, rank) for rank in range(layout.ranks)]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn, float32 scales of blocks of 128 x 128) of a matrix, or of each of a stack."""
    values = weight.to(torch.float32)
    rows, columns = values.shape[-2:]
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.nn.functional.pad(values, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    blocks = padded.reshape(*values.shape[:-2], down, BLOCK, across, BLOCK)
    scales = (blocks.abs().amax(dim=(-3, -1)) / 448.0).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (blocks / scales[..., :, None, :, None]).clamp(-448.0, 448.0)
    whole = scaled.reshape(padded.shape)[..., :rows, :columns]
    return whole.contiguous().to(torch.float8_e4m3fn), scales.contiguous()


def _rank_tensors(state: Mapping[str, Tensor], card: ModelCard, layout: ReplicaLayout, rank: int) -> dict[str, Tensor]:
    seat, found = rank % layout.tp, dict[str, Tensor]()

    def rows(name: str) -> Tensor:
        """Rows of this rank; key and value heads that are fewer than ranks are kept by several."""
        heads = card.kv_heads if re.search(r"[kv]_proj", name) else card.heads
        if re.search(r"[qkv]_proj", name) and layout.tp > heads:
            return state[name].chunk(heads)[seat * heads // layout.tp]
        return _share(state[name], layout.tp, seat)

    def put(name: str, weight: Tensor, eight: bool) -> None:
        if eight and layout.fp8:
            found[name], found[name + SCALE_SUFFIX] = quantise(weight)
        else:
            found[name] = (weight.to(torch.bfloat16) if weight.dtype == torch.float32 else weight).contiguous()

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:  # a head that is tied to the embedding is no parameter of its own
            put(name, rows(name), False)
    put("model.norm.weight", state["model.norm.weight"], False)
    for layer in range(card.layers):
        root = f"model.layers.{layer}."
        for module, parts in FUSED.items():
            for kind in ("weight", "bias"):
                names = [f"{root}{part}.{kind}" for part in parts]
                if names[0] in state:
                    put(f"{root}{module}.{kind}", torch.cat([rows(name) for name in names]), kind == "weight")
        for module in COLUMNS:
            name = f"{root}{module}.weight"
            if name in state:
                put(name, _share(state[name], layout.tp, seat, 1), True)
        for module in WHOLE:
            if (name := f"{root}{module}.weight") in state:
                put(name, state[name], False)
        for source, name in EXPERTS.items():
            if root + source in state:
                put(root + name, state[root + source].chunk(layout.ranks)[rank], True)
    return found


def _share(weight: Tensor, count: int, seat: int, dim: int = 0) -> Tensor:
    length = -(-weight.shape[dim] // count)
    begin = min(seat * length, weight.shape[dim])
    return weight.narrow(dim, begin, min(length, weight.shape[dim] - begin))
