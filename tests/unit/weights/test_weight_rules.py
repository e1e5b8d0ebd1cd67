"""Rules bring transformers' parameters into an engine's tensors as its own loader would, and refuse in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncfabric.weights import (
    Held,
    LocalTensor,
    Mesh,
    ReplicaMemory,
    Rule,
    Shard,
    causal_rules,
    execute,
    moves_by_rules,
    place,
    plan_weights,
)
from asyncfabric.weights.plan.formats import to_e4m3

torch = pytest.importorskip("torch", reason="RULES WERE NOT COMPARED: torch is not installed")
transformers = pytest.importorskip("transformers", reason="RULES WERE NOT COMPARED: transformers is not installed")

from asyncfabric.weights.tensors import dtype_of, stored  # noqa: E402  # needs torch

HEADS, KV_HEADS, VOCAB = 8, 2, 300
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}


def state_of(name: str) -> dict[str, Any]:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16)
    return {each: parameter.detach() for each, parameter in model.named_parameters()}


def loaded(state: dict[str, Any], rank: int, tp: int, *, split_experts: bool) -> dict[str, Any]:
    """What an engine's loader makes of a checkpoint on one of `tp` ranks: columns, rows, heads, experts by hand."""

    def rows(tensor: Any, count: int = tp, which: int = rank) -> Any:
        return tensor.chunk(count)[which]

    def heads_of_keys(tensor: Any) -> Any:
        return rows(tensor) if tp <= KV_HEADS else tensor.chunk(KV_HEADS)[rank * KV_HEADS // tp]

    padded = -(-VOCAB // 64) * 64 // tp
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        root, _, kind = name.rpartition(".")
        layer, _, module = root.rpartition(".")
        if module == "q_proj":
            keys, values = (state[f"{layer}.{each}.{kind}"] for each in ("k_proj", "v_proj"))
            found[f"{layer}.qkv_proj.{kind}"] = torch.cat([rows(tensor), heads_of_keys(keys), heads_of_keys(values)])
        elif module == "gate_proj":
            found[f"{layer}.gate_up_proj.{kind}"] = torch.cat([rows(tensor), rows(state[f"{layer}.up_proj.{kind}"])])
        elif kind == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            both = torch.cat([gate.chunk(tp, dim=1)[rank], up.chunk(tp, dim=1)[rank]], dim=1)
            found[f"{root}.w13_weight"] = both if split_experts else rows(tensor)
        elif kind == "down_proj":
            found[f"{root}.w2_weight"] = tensor.chunk(tp, dim=2)[rank] if split_experts else rows(tensor)
        elif module in ("o_proj", "down_proj") and kind == "weight":
            found[name] = tensor.chunk(tp, dim=1)[rank]
        elif module in ("embed_tokens", "lm_head"):
            found[name] = tensor[rank * padded : (rank + 1) * padded]
        elif module not in ("k_proj", "v_proj", "up_proj"):
            found[name] = tensor
    return found


def held_of(state: dict[str, Any], trainers: int) -> dict[str, Held]:
    mesh = Mesh.of({"fsdp": trainers})
    return {
        name: Held(dtype_of(tensor), place(tuple(tensor.shape), mesh, {"fsdp": Shard(0)}))
        for name, tensor in state.items()
    }


def carried_out(state: dict[str, Any], engine: list[dict[str, LocalTensor]], rules: Any, trainers: int) -> Any:
    held = held_of(state, trainers)
    plan = plan_weights(
        moves_by_rules(held, engine, rules), trainers=trainers, receivers=len(engine), replicas=("one",)
    )

    def shard(rank: int, name: str) -> Any:
        placement = held[name].placement
        row = placement.row_of(rank)
        box = zip(placement.starts[row], placement.sizes[row], strict=True)
        return stored(state[name])[tuple(slice(begin, begin + size) for begin, size in box)]

    memory = ReplicaMemory(plan)
    execute(plan, shard, memory)
    assert all((count == 1).all() for count in memory.counts.values())
    return memory.tensors


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "split_experts"),
    [*((name, False) for name in sorted(MODELS)), ("mixtral", True), ("qwen3_moe", True)],
)
def test_an_engine_gets_what_its_loader_would_have_made(name: str, split_experts: bool, tp: int) -> None:
    state = state_of(name)
    wanted = [loaded(state, rank, tp, split_experts=split_experts) for rank in range(tp)]
    room = -(-VOCAB // 64) * 64 // tp  # engines round the vocabulary up, and the last rank's rows are not all used
    engine = [
        {
            each: LocalTensor("bfloat16", (room, 64) if each.startswith(("model.embed", "lm_head")) else tuple(t.shape))
            for each, t in one.items()
        }
        for one in wanted
    ]
    got = carried_out(state, engine, causal_rules(HEADS, KV_HEADS), trainers=3)
    expected = {
        ("one", rank, each): stored(tensor.contiguous()).view(np.uint8).reshape(-1)
        for rank, one in enumerate(wanted)
        for each, tensor in one.items()
    }
    assert got.keys() == expected.keys()
    assert [key for key in got if not np.array_equal(got[key], expected[key])] == []


def test_an_engine_decides_about_types_and_turns() -> None:
    weight = torch.randn(256, 128)
    engine = [
        {
            "w": LocalTensor("bfloat16", (128, 256)),
            "q": LocalTensor("float8_e4m3fn", (256, 128)),
            "q_scale_inv": LocalTensor("float32", (2, 1)),
        }
    ]
    rules = (Rule(source="w", transposed=True), Rule(source="q"))
    got = carried_out({"w": weight, "q": weight}, engine, rules, trainers=2)
    assert np.array_equal(got["one", 0, "w"], stored(weight.T.contiguous().bfloat16()).view(np.uint8).reshape(-1))
    scales = got["one", 0, "q_scale_inv"].view(np.float32).reshape(2, 1).repeat(128, axis=0)
    assert np.array_equal(got["one", 0, "q"].reshape(256, 128), to_e4m3(weight.numpy() / scales))


def held(*shape: int) -> Held:
    return Held("bfloat16", place(shape, Mesh.of({"fsdp": 2}), {"fsdp": Shard(0)}))


@pytest.mark.parametrize(
    ("given", "engine", "rules", "words"),
    [
        ({"a": held(4, 4)}, [{"b": (4, 4)}], [Rule(source="b")], "a: no rule states where the engine wants it"),
        ({"a": held(4, 4)}, [{"b": (4, 4)}], [Rule(source="a")], "the rules name a, which no rank of the engine has"),
        ({"a": held(4, 4)}, [{"a": (4, 4), "b": (2,)}], [Rule(source="a")], "nothing of the trainer goes into b"),
        (
            {"a": held(4, 4)},
            [{"a": (4, 4, 1)}],
            [Rule(source="a")],
            r"a has shape \(4, 4\), the engine's tensor \(4, 4",
        ),
        ({"a": held(6, 4)}, [{"a": (2, 4)}] * 2, [Rule(source="a")], "would have to be cut 3 ways"),
        (
            {"a": held(4, 4), "b": held(4, 4)},
            [{"c": (7, 4)}],
            [Rule(source="a", tensor="c"), Rule(source="b", tensor="c", part=1)],
            "its 7 rows are no share of 4 of a \\+ 4 of b among 1 ranks",
        ),
        (
            {"a": held(4, 4), "b": held(4, 4)},
            [{"c": (8, 4)}],
            [Rule(source="a", tensor="c"), Rule(source="b", tensor="c")],
            "a and another parameter are the same part of it",
        ),
        ({"a": held(5, 4)}, [{"a": (5, 4)}], [Rule(source="a", pieces=2)], "cannot be cut into 2 pieces"),
        ({"a": held(5, 4)}, [{"a": (5, 4)}], [Rule(source="a", units=2)], "5 rows are not 2 whole heads"),
        ({"a": held(5, 4)}, [], [Rule(source="a")], "an engine has one rank or more"),
    ],
)
def test_what_does_not_fit_is_reported_by_name(given: Any, engine: Any, rules: Any, words: str) -> None:
    tensors = [{name: LocalTensor("bfloat16", shape) for name, shape in one.items()} for one in engine]
    with pytest.raises(ValueError, match=words):
        moves_by_rules(given, tensors, rules)


def test_a_rule_without_a_tensor_leaves_a_parameter_out() -> None:
    rules = (Rule(source=r"inv_freq", tensor=""), Rule(source=".*"))
    moves = moves_by_rules({"inv_freq": held(4), "a": held(4, 4)}, [{"a": LocalTensor("bfloat16", (4, 4))}], rules)
    assert [move.parameter for move in moves] == ["a"]
