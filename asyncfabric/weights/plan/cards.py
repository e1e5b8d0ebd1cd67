"""Model cards: names, shapes and kinds of all parameters of models that people train. Data and its unrolling; pure.

The numbers are those of the public config.json of each model; `source` names the one. How parameters are spread over
ranks does not belong here, see `layouts`. Multi-token-prediction layers are left out: engines that serve without them
load none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

Split = Literal["rows", "columns", "heads", "kv_heads", "none"]
"""How tensor parallelism cuts a matrix: rows are outputs; heads are rows that hold whole heads."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a model, by the names of its config.json.

    Attributes:
        family: deepseek (latent attention), qwen3_moe or llama (grouped queries).
        dense_layers: leading layers with a dense MLP; all of them in a dense model.
        source: where the numbers are from.
    """

    name: str
    family: Literal["deepseek", "qwen3_moe", "llama"]
    layers: int
    hidden: int
    vocab: int
    heads: int
    intermediate: int
    kv_heads: int = 0
    head_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    dense_layers: int = 0
    experts: int = 0
    shared_experts: int = 0
    moe_intermediate: int = 0
    source: str = ""


class Parameter(NamedTuple):
    """One parameter as the trainer names it.

    Attributes:
        layer: its layer, -1 before the first one, `layers` after the last one.
        split: how tensor parallelism cuts it at a replica.
        fused: the tensor of a replica that it is a part of, parts in the order in which they are listed.
        expert: its number, -1 when it belongs to no expert.
        quantised: whether FP8 serving stores it in FP8.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int
    split: Split
    fused: str
    expert: int = -1
    quantised: bool = False


_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

CARDS: dict[str, ModelCard] = {
    card.name: card
    for card in (
        ModelCard(
            name="kimi-k2", family="deepseek", layers=61, hidden=7168, vocab=163840, heads=64, intermediate=18432,
            dense_layers=1, experts=384, shared_experts=1, moe_intermediate=2048, **_DEEPSEEK,
            source="huggingface.co/moonshotai/Kimi-K2-Instruct config.json",
        ),
        ModelCard(
            name="deepseek-v3", family="deepseek", layers=61, hidden=7168, vocab=129280, heads=128, intermediate=18432,
            dense_layers=3, experts=256, shared_experts=1, moe_intermediate=2048, **_DEEPSEEK,
            source="huggingface.co/deepseek-ai/DeepSeek-V3 config.json",
        ),
        ModelCard(
            name="qwen3-235b-a22b", family="qwen3_moe", layers=94, hidden=4096, vocab=151936, heads=64,
            intermediate=12288, kv_heads=4, head_dim=128, experts=128, moe_intermediate=1536,
            source="huggingface.co/Qwen/Qwen3-235B-A22B config.json",
        ),
        ModelCard(
            name="llama-3.1-70b", family="llama", layers=80, hidden=8192, vocab=128256, heads=64, intermediate=28672,
            kv_heads=8, head_dim=128, dense_layers=80,
            source="huggingface.co/meta-llama/Llama-3.1-70B config.json",
        ),
        ModelCard(
            name="tiny", family="deepseek", layers=2, hidden=256, vocab=512, heads=4, intermediate=512, dense_layers=1,
            q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64,
            experts=8, shared_experts=1, moe_intermediate=256, source="made up, for tests",
        ),
    )
}  # fmt: skip


def card(name: str) -> ModelCard:
    """Return a model card; raises ValueError naming those that there are."""
    if name not in CARDS:
        raise ValueError(f"there is no model card {name!r}, known are {sorted(CARDS)}")
    return CARDS[name]


def parameters(card: ModelCard) -> Iterator[Parameter]:
    """Yield all parameters in the order in which a forward pass needs them."""
    yield Parameter("model.embed_tokens.weight", (card.vocab, card.hidden), "bfloat16", -1, "rows", "")
    for layer in range(card.layers):
        root = f"model.layers.{layer}."
        yield _vector(root + "input_layernorm.weight", card.hidden, layer)
        yield from _latent_attention(card, layer) if card.family == "deepseek" else _grouped_attention(card, layer)
        yield _vector(root + "post_attention_layernorm.weight", card.hidden, layer)
        if layer < card.dense_layers or not card.experts:
            yield from _mlp(card.hidden, card.intermediate, root + "mlp.", layer)
        else:
            yield from _experts(card, layer)
    yield _vector("model.norm.weight", card.hidden, card.layers)
    yield Parameter("lm_head.weight", (card.vocab, card.hidden), "bfloat16", card.layers, "rows", "")


def _vector(name: str, length: int, layer: int) -> Parameter:
    return Parameter(name, (length,), "bfloat16", layer, "none", "")


def _matrix(
    name: str, rows: int, columns: int, layer: int, split: Split, fused: str = "", expert: int = -1
) -> Parameter:
    return Parameter(name, (rows, columns), "bfloat16", layer, split, fused, expert, quantised=True)


def _latent_attention(card: ModelCard, layer: int) -> Iterator[Parameter]:
    root = f"model.layers.{layer}.self_attn."
    latent, width = card.kv_lora_rank, card.heads * (card.qk_nope_head_dim + card.qk_rope_head_dim)
    down = root + "fused_qkv_a_proj.weight"
    yield _matrix(root + "q_a_proj.weight", card.q_lora_rank, card.hidden, layer, "none", down)
    yield _matrix(root + "kv_a_proj_with_mqa.weight", latent + card.qk_rope_head_dim, card.hidden, layer, "none", down)
    yield _vector(root + "q_a_layernorm.weight", card.q_lora_rank, layer)
    yield _vector(root + "kv_a_layernorm.weight", latent, layer)
    yield _matrix(root + "q_b_proj.weight", width, card.q_lora_rank, layer, "heads")
    up = card.heads * (card.qk_nope_head_dim + card.v_head_dim)
    yield _matrix(root + "kv_b_proj.weight", up, latent, layer, "heads")
    yield _matrix(root + "o_proj.weight", card.hidden, card.heads * card.v_head_dim, layer, "columns")


def _grouped_attention(card: ModelCard, layer: int) -> Iterator[Parameter]:
    root = f"model.layers.{layer}.self_attn."
    queries, keys = card.heads * card.head_dim, card.kv_heads * card.head_dim
    yield _matrix(root + "q_proj.weight", queries, card.hidden, layer, "heads", root + "qkv_proj.weight")
    yield _matrix(root + "k_proj.weight", keys, card.hidden, layer, "kv_heads", root + "qkv_proj.weight")
    yield _matrix(root + "v_proj.weight", keys, card.hidden, layer, "kv_heads", root + "qkv_proj.weight")
    if card.family == "qwen3_moe":
        yield _vector(root + "q_norm.weight", card.head_dim, layer)
        yield _vector(root + "k_norm.weight", card.head_dim, layer)
    yield _matrix(root + "o_proj.weight", card.hidden, queries, layer, "columns")


def _mlp(hidden: int, width: int, root: str, layer: int, stack: str = "", expert: int = -1) -> Iterator[Parameter]:
    first, second = (stack + "w13_weight", stack + "w2_weight") if stack else (root + "gate_up_proj.weight", "")
    yield _matrix(root + "gate_proj.weight", width, hidden, layer, "rows", first, expert)
    yield _matrix(root + "up_proj.weight", width, hidden, layer, "rows", first, expert)
    yield _matrix(root + "down_proj.weight", hidden, width, layer, "columns", second, expert)


def _experts(card: ModelCard, layer: int) -> Iterator[Parameter]:
    root = f"model.layers.{layer}.mlp."
    yield Parameter(root + "gate.weight", (card.experts, card.hidden), "bfloat16", layer, "none", "")
    if card.family == "deepseek":
        yield Parameter(root + "gate.e_score_correction_bias", (card.experts,), "float32", layer, "none", "")
    if card.shared_experts:
        shared = card.shared_experts * card.moe_intermediate
        yield from _mlp(card.hidden, shared, root + "shared_experts.", layer)
    for expert in range(card.experts):
        name = f"{root}experts.{expert}."
        yield from _mlp(card.hidden, card.moe_intermediate, name, layer, root + "experts.", expert)
