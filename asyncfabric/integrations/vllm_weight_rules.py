"""Rules from transformers' parameters to those of vLLM's model classes, by the names that a class uses. Pure.

vLLM 0.26 and 0.33 name the experts of a layer otherwise than earlier ones, and some classes rename attention or the
embedding; so the table is made for the names of the engine at hand. Source: `load_weights` of vLLM's classes, with
which the tests compare it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from asyncfabric.weights import Rule, causal_rules

_LAYER = r"(model\.layers\.\d+\.)"
_EXPERTS = re.compile(r"model\.layers\.\d+\.(.+)\.w13_weight")


def weight_rules(names: Iterable[str], *, heads: int, kv_heads: int, ranks: int = 1) -> tuple[Rule, ...]:
    """Return the rules for a model class of vLLM; for `asyncfabric.weights.moves_by_rules`.

    Known: Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2 and 3, DeepSeek-V3 (latent attention, shared
    experts), GPT-OSS without MXFP4.

    Args:
        names: of the parameters of the engine's model, from `model.named_parameters()`.
        heads: attention heads of the model, of all ranks.
        kv_heads: heads of keys and values.
        ranks: of tensor parallelism.

    Raises:
        ValueError: GPT-OSS over several ranks: vLLM keeps the biases of experts at the first one, which no rule states.
    """
    known = set(names)
    interleaved = any(".attn.qkv_proj." in name for name in known)
    if interleaved and ranks > 1:
        raise ValueError(f"the rules of GPT-OSS are for one rank, the engine has {ranks}")
    experts = next((found[1] for name in known if (found := _EXPERTS.fullmatch(name))), "")
    return (
        *(_interleaved(experts, heads, kv_heads) if interleaved else ()),
        *(_experts(experts) if experts else ()),
        *_latent_attention(known, heads),
        *causal_rules(heads, kv_heads),
    )


def _experts(path: str) -> tuple[Rule, ...]:
    """Experts and their router, which transformers keeps in `mlp` and a class of vLLM in a module of another name."""
    layer, one = rf"\1{path}.", _LAYER + r"mlp\.experts\.(\d+)\."
    return (
        Rule(source=one + r"gate_proj\.weight", tensor=layer + "w13_weight", part=0, expert=2),
        Rule(source=one + r"up_proj\.weight", tensor=layer + "w13_weight", part=1, expert=2),
        Rule(source=one + r"down_proj\.weight", tensor=layer + "w2_weight", expert=2),
        Rule(source=_LAYER + r"mlp\.experts\.gate_up_proj", tensor=layer + "w13_weight", dim=1, pieces=2),
        Rule(source=_LAYER + r"mlp\.experts\.down_proj", tensor=layer + "w2_weight", dim=1),
        Rule(source=_LAYER + r"mlp\.gate\.(.*)", tensor=rf"\1{path.partition('.')[0]}.gate.\2"),
    )


def _latent_attention(known: set[str], heads: int) -> tuple[Rule, ...]:
    """Queries and keys that are projected down first: both projections are one tensor, whole on each rank."""
    if not any("fused_qkv_a_proj" in name for name in known):
        return ()
    down = r"\1fused_qkv_a_proj.weight"
    return (
        Rule(source=r"(.*\.self_attn\.)q_a_proj\.weight", tensor=down, part=0),
        Rule(source=r"(.*\.self_attn\.)kv_a_proj_with_mqa\.weight", tensor=down, part=1),
        Rule(source=r".*\.self_attn\.(?:q|kv)_b_proj\.weight", units=heads),
    )


def _interleaved(path: str, heads: int, kv_heads: int) -> tuple[Rule, ...]:
    """GPT-OSS: attention and embedding have other names; experts lie transposed, gate and up rows take turns."""
    layer, stack = rf"\1{path}.", _LAYER + r"mlp\.experts\."
    qkv = r"\1attn.qkv_proj.\3"
    return (
        Rule(source=r"model\.embed_tokens\.weight", tensor="model.embedding.weight"),
        Rule(source=stack + "gate_up_proj", tensor=layer + "w13_weight", dim=2, transposed=True),
        Rule(source=stack + "gate_up_proj_bias", tensor=layer + "w13_bias", dim=1),
        Rule(source=stack + "down_proj", tensor=layer + "w2_weight", dim=1, transposed=True),
        Rule(source=stack + "down_proj_bias", tensor=layer + "w2_bias", dim=1),
        Rule(source=_LAYER + r"self_attn\.(q)_proj\.(weight|bias)", tensor=qkv, part=0, units=heads),
        Rule(source=_LAYER + r"self_attn\.(k)_proj\.(weight|bias)", tensor=qkv, part=1, units=kv_heads),
        Rule(source=_LAYER + r"self_attn\.(v)_proj\.(weight|bias)", tensor=qkv, part=2, units=kv_heads),
        Rule(source=_LAYER + r"self_attn\.(.*)", tensor=r"\1attn.\2"),
    )
