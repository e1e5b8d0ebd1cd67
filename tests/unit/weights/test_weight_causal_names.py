"""Parameters of a causal model by their names: what is missing or has another name is refused, with what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncfabric.weights import Mesh, ReplicaLayout, place
from asyncfabric.weights.plan.causal import card_of, causal_moves
from asyncfabric.weights.plan.holdings import Held

CARD = card_of(
    SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=256,
        intermediate_size=128,
    )
)
LAYER = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    f"model.layers.{layer}.{module}.weight": shape for layer in range(2) for module, shape in LAYER.items()
} | {"model.embed_tokens.weight": (256, 64), "model.norm.weight": (64,), "lm_head.weight": (256, 64)}


def moves(shapes: dict[str, tuple[int, ...]]) -> int:
    trainer = Mesh.of({"all": 1})
    return len(causal_moves({n: Held("float32", place(s, trainer)) for n, s in shapes.items()}, CARD, ReplicaLayout()))


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in SHAPES.items() if name not in names}


def test_a_whole_model_moves_with_a_tied_head_too() -> None:
    assert moves(SHAPES) == len(SHAPES)
    assert moves(without("lm_head.weight")) == len(SHAPES) - 1


@pytest.mark.parametrize("name", [name for name in SHAPES if ".1." in name or "head" not in name])
def test_what_is_left_out_is_named(name: str) -> None:
    """Of a fused tensor nobody would have noticed it: the other parts filled a smaller one."""
    root = name.removesuffix("_proj.weight")
    fused = {"q": "", "k": "qkv_proj", "v": "qkv_proj", "gate": "gate_up_proj", "up": "gate_up_proj"}.get(
        root.rpartition(".")[2], ""
    )
    text = rf"{fused}\.weight is fused of \d parameters, but only .*" if fused else f"{name} is not given: "
    with pytest.raises(ValueError, match=f"{text}give all parameters of the model, those that are not trained too"):
        moves(without(name))


def test_layers_that_are_left_out_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.1\.input_layernorm\.weight is not given"):
        moves({name: shape for name, shape in SHAPES.items() if ".1." not in name})


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("module.model.norm.weight", "give it as model.norm.weight"),
        ("_orig_mod.model.norm.weight", "give it as model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "give it as model.norm.weight"),
        (
            "model.layers.0._orig_mod._checkpoint_wrapped_module.mlp.up_proj.weight",
            "give it as model.layers.0.mlp.up_proj.weight",
        ),
        ("base_model.model.model.norm.weight", "merge adapters"),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "merge adapters"),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "merge adapters"),
        ("model.layers.0.ema", "leave out buffers"),
    ],
)
def test_names_of_wrappers_and_adapters_state_what_to_do(given: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"^{given}: no known parameter of a causal model, .*; .*{advice}"):
        moves(SHAPES | {given: (64,)})
