"""From the parameters of a transformers causal model to the tensors that an engine serves from: the moves. Pure.

Queries, keys and values become one tensor, gate and up become one, experts are stacked; by name, as the Llama,
Qwen and Mixtral families have them. A parameter that the table does not know is an error: one that was left out, or
repeated where it should be cut, would be found much later and by its answers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncfabric.weights.plan.cards import ModelCard, Split
from asyncfabric.weights.plan.formats import BLOCK
from asyncfabric.weights.plan.holdings import Held
from asyncfabric.weights.plan.layouts import ReplicaCuts, ReplicaLayout
from asyncfabric.weights.plan.placement import Mesh, Shard, place
from asyncfabric.weights.plan.target import Move, alone

_ALL = "give all parameters of the model, those that are not trained too"


class _Rule(NamedTuple):
    """How a parameter is cut, what it is fused into and as which part, and whether FP8 serving quantises it."""

    split: Split
    fused: str = ""
    part: int = 0
    quantised: bool = True


_KEPT = _Rule("none", quantised=False)

_RULES = {
    "self_attn.q_proj": _Rule("heads", "self_attn.qkv_proj", 0),
    "self_attn.k_proj": _Rule("kv_heads", "self_attn.qkv_proj", 1),
    "self_attn.v_proj": _Rule("kv_heads", "self_attn.qkv_proj", 2),
    "self_attn.o_proj": _Rule("columns"),
    "self_attn.q_norm": _KEPT,
    "self_attn.k_norm": _KEPT,
    "mlp.gate_proj": _Rule("rows", "mlp.gate_up_proj", 0),
    "mlp.up_proj": _Rule("rows", "mlp.gate_up_proj", 1),
    "mlp.down_proj": _Rule("columns"),
    "mlp.gate": _KEPT,
    "input_layernorm": _KEPT,
    "post_attention_layernorm": _KEPT,
}

_EXPERT = {
    "gate_proj": _Rule("none", "w13_weight", 0),
    "up_proj": _Rule("none", "w13_weight", 1),
    "down_proj": _Rule("none", "w2_weight", 0),
}

_STACKED = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}

_OUTSIDE = {
    "model.embed_tokens.weight": _Rule("rows", quantised=False),
    "model.norm.weight": _KEPT,
    "lm_head.weight": _Rule("rows", quantised=False),
}

_PARTS = {"self_attn.qkv_proj": 3, "mlp.gate_up_proj": 2, "w13_weight": 2}

_IN_EACH_LAYER = ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm")

_WRAPPED = re.compile(r"^module\.|_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")

_ONE_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.weight")

_ALL_EXPERTS = re.compile(r"mlp\.experts\.(\w+)")


def card_of(config: Any, name: str = "") -> ModelCard:
    """Return the dimensions of a transformers configuration of the Llama, Qwen or Mixtral families.

    Raises:
        ValueError: it has no heads or no layers, so it is of another kind.
    """

    def number(*names: str) -> int:
        return next((int(value) for each in names if (value := getattr(config, each, None))), 0)

    heads, layers, hidden = number("num_attention_heads"), number("num_hidden_layers"), number("hidden_size")
    if not (heads and layers and hidden):
        raise ValueError(f"{type(config).__name__} has no attention heads, layers or width: no causal model we know")
    experts = number("num_local_experts", "num_experts")
    return ModelCard(
        name=name or str(getattr(config, "model_type", "")),
        family="qwen3_moe" if experts else "llama",
        layers=layers,
        hidden=hidden,
        vocab=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or hidden // heads,
        intermediate=number("intermediate_size"),
        moe_intermediate=number("moe_intermediate_size", "intermediate_size") if experts else 0,
        experts=experts,
        dense_layers=0 if experts else layers,
        source="a transformers configuration",
    )


def causal_moves(held: Mapping[str, Held], card: ModelCard, replica: ReplicaLayout) -> list[Move]:
    """Return what brings the parameters of a causal model into a replica: fused, stacked, in FP8 when it wants that.

    Experts may be parameters of their own or stacked already, (experts, rows, columns), as transformers 5 has them.
    A replica keeps parameters of other types than float8 as bfloat16 if the trainer has float32.

    Raises:
        ValueError: a parameter has an unknown name, or one that every such model has is not given, or ranks do not
            divide experts or heads, each by its name.
    """
    cuts = ReplicaCuts(card, replica)
    if card.experts % replica.ranks and card.experts:
        raise ValueError(f"{replica.ranks} ranks cannot share {card.experts} experts evenly")
    tensors: dict[tuple[str, int], dict[int, tuple[str, _Rule]]] = {}
    moves = []
    for name in held:
        rule, region, expert = _rule_of(name)
        if rule is None:
            moves.append(_stacked_move(name, held[name], region, replica))
        else:
            tensors.setdefault((region, expert), {})[rule.part] = (name, rule)
    _check_whole(held, card)
    for (region, expert), parts in tensors.items():
        named = [parts[part] for part in sorted(parts)]
        fused = named[0][1].fused
        if len(parts) < (count := _PARTS.get(fused, 1)):
            known = " and ".join(name for name, _ in named)
            raise ValueError(f"{region} is fused of {count} parameters, but only {known} is given: {_ALL}")
        shapes = tuple((held[name].placement.shape, rule.split) for name, rule in named)
        for (name, rule), target in zip(named, cuts.targets(shapes, expert), strict=True):
            matrix = len(held[name].placement.shape) > 1
            moves.append(_move(name, held[name], region, target, replica.fp8 and rule.quantised and matrix))
    return moves


def _rule_of(name: str) -> tuple[_Rule | None, str, int]:
    """Return (rule, tensor of the replica, expert or -1); no rule for stacked experts."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], name, -1
    layer = _LAYER.fullmatch(name)
    root, rest = (layer[1], layer[2]) if layer else ("", name)
    one, every = _ONE_EXPERT.fullmatch(rest), _ALL_EXPERTS.fullmatch(rest)
    if one and one[2] in _EXPERT:
        rule = _EXPERT[one[2]]
        return rule, f"{root}mlp.experts.{rule.fused}", int(one[1])
    if every and every[1] in _STACKED:
        return None, f"{root}mlp.experts.{_STACKED[every[1]]}", -1
    module, _, kind = rest.rpartition(".")
    if layer is None or module not in _RULES or kind not in ("weight", "bias"):
        raise ValueError(
            f"{name}: no known parameter of a causal model, so it is unknown where a replica wants it; {_advice(name)}"
        )
    rule = _RULES[module]
    if kind == "bias":
        if rule.split == "columns":
            raise ValueError(f"{name}: a bias after cut columns would be added by every rank; not supported")
        rule = rule._replace(quantised=False)
    return rule, f"{root}{rule.fused or module}.{kind}", -1


def _advice(name: str) -> str:
    bare = _WRAPPED.sub("", name)
    if bare != name:
        return f"a wrapper named it so: give it as {bare}"
    if "lora_" in name or ".base_layer." in name or name.startswith("base_model."):
        return "merge adapters into the model, and give the parameters that it has then"
    return "the families of Llama, Qwen and Mixtral are known; leave out buffers and what only training needs"


def _check_whole(held: Mapping[str, Held], card: ModelCard) -> None:
    """Refuse parameters of which some were left out: a replica without them would answer wrongly, or not at all."""
    needed = ["model.embed_tokens.weight", "model.norm.weight"]
    needed += [f"model.layers.{layer}.{module}.weight" for layer in range(card.layers) for module in _IN_EACH_LAYER]
    mixed = {layer[1] for name in held if (layer := _LAYER.fullmatch(name)) and layer[2].startswith("mlp.experts.")}
    roots = (f"model.layers.{layer}." for layer in range(card.layers))
    needed += [f"{root}mlp.down_proj.weight" for root in roots if root not in mixed]
    for name in needed:
        if name not in held:
            raise ValueError(f"{name} is not given: {_ALL}")


def _stacked_move(name: str, held: Held, region: str, replica: ReplicaLayout) -> Move:
    if held.placement.shape[0] % replica.ranks:
        raise ValueError(f"{name}: {replica.ranks} ranks cannot share {held.placement.shape[0]} experts evenly")
    wanted = place(held.placement.shape, Mesh.of({"ep": replica.ranks}), {"ep": Shard(0)})
    return _move(name, held, region, alone(wanted), replica.fp8)


def _move(name: str, held: Held, region: str, target: Any, eight: bool) -> Move:
    to = "bfloat16" if held.dtype == "float32" else held.dtype
    if eight:
        return Move(name, held.dtype, held.placement, region, "float8_e4m3fn", target, BLOCK)
    return Move(name, held.dtype, held.placement, region, to, target)
