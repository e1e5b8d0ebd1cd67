"""What an engine's rank makes of a parameter that arrived: fp8 by channel and tensor, MXFP8, a user's own function."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="CONVERSIONS OF WEIGHTS WERE NOT RUN: torch is not installed")

from asyncfabric import FabricConfig  # noqa: E402
from asyncfabric.weights import Rule  # noqa: E402
from asyncfabric.weights.sessions import Conversion, LocalJoin, open_receiver, open_sender  # noqa: E402

LOCAL = FabricConfig(rails=("local",))
F8, LARGEST = torch.float8_e4m3fn, 448.0


async def applied(weights: Mapping[str, Any], engine: Mapping[str, Any], ranks: int = 1, **options: Any) -> None:
    """Publish weights, and then as many times larger, and apply both; `engine` has the names of rank 0, then 1."""
    join, done = LocalJoin(), 0

    async def train() -> None:
        async with open_sender(weights, join, config=LOCAL) as sender:
            await sender.publish(1)
            for weight in weights.values():
                weight.mul_(3)
            await sender.publish(2)
            await trio.sleep_forever()

    async def serve(rank: int) -> None:
        nonlocal done
        named = {name: tensor for name, tensor in engine.items() if ranks == 1}
        named |= {name[2:]: tensor for name, tensor in engine.items() if ranks > 1 and name[:2] == f"{rank}/"}
        opened = open_receiver(named, join, rank=rank, ranks=ranks, config=LOCAL, **options)
        async with opened as receiver:
            while receiver.version < 2:
                await receiver.wait()
                receiver.apply()
            done += 1
            while done < ranks:  # noqa: ASYNC110  # the others need this one's part of the meeting
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            for rank in range(ranks):
                nursery.start_soon(serve, rank)


def by_channel(weight: Any) -> tuple[Any, Any]:
    """Return what vLLM's loop over rows does, one row after the other."""
    rows, scales = [], []
    for row in weight.reshape(-1, weight.shape[-1]).float():
        scale = max(float(row.abs().max()) / LARGEST, 1 / (LARGEST * 512))
        scale = torch.tensor(scale)
        rows.append((row * (1 / scale)).clamp(-LARGEST, LARGEST).to(F8))
        scales.append(scale)
    return torch.stack(rows).view(weight.shape), torch.stack(scales).view(*weight.shape[:-1], 1)


def equal(found: Any, wanted: Any) -> bool:
    return bool(found.shape == wanted.shape and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)))


def random(*shape: int) -> Any:
    """Return weights of sizes that differ by row, some of them zeros."""
    found = torch.randn(shape) * 10.0 ** torch.randint(-6, 4, (*shape[:-1], 1))
    found[..., 0, :] = 0
    return found.bfloat16()


@pytest.mark.trio
async def test_rows_have_scales_of_their_own_in_what_is_fused_and_cut() -> None:
    """Two ranks of tensor parallelism: gate and up are one tensor, whose rows a rank has half of."""
    weights = {"gate": random(64, 96), "up": random(64, 96), "norm": torch.randn(96)}
    wanted = {name: weight.clone() * 3 for name, weight in weights.items()}
    engine: dict[str, Any] = {}
    for rank in range(2):
        engine |= {
            f"{rank}/gate_up": torch.zeros(64, 96).to(F8),
            f"{rank}/gate_up_scale": torch.zeros(64, 1),
            f"{rank}/norm": torch.zeros(96),
        }
    gate, up = (
        Rule(source=name, tensor="gate_up", part=part, convert="fp8-channel")
        for part, name in enumerate(("gate", "up"))
    )
    await applied(weights, engine, 2, rules=[gate, up, Rule(source=".*")])
    for rank in range(2):
        rows = torch.cat([wanted[name].chunk(2)[rank] for name in ("gate", "up")])
        quantised, scales = by_channel(rows)
        assert equal(engine[f"{rank}/gate_up"], quantised) and equal(engine[f"{rank}/gate_up_scale"], scales)
        assert torch.equal(engine[f"{rank}/norm"], wanted["norm"])


@pytest.mark.trio
async def test_a_tensor_has_one_scale_and_each_expert_of_a_stack() -> None:
    weights = {"w": random(40, 64), **{f"experts.{number}": random(16, 32) for number in range(4)}}
    wanted = {name: weight.clone() * 3 for name, weight in weights.items()}
    engine = {
        "w": torch.zeros(48, 64).to(F8),  # more rows than come
        "w_scale": torch.zeros(1),
        "experts": torch.zeros(4, 16, 32).to(F8),
        "experts_scale": torch.zeros(4),
    }
    rules = [
        Rule(source="w", convert="fp8-tensor"),
        Rule(source=r"experts\.(\d+)", tensor="experts", expert=1, convert="fp8-tensor"),
    ]
    await applied(weights, engine, rules=rules)
    for name, quantised, scale in [
        ("w", engine["w"][:40], engine["w_scale"][0]),
        *((f"experts.{number}", engine["experts"][number], engine["experts_scale"][number]) for number in range(4)),
    ]:
        largest = float(wanted[name].abs().max())
        assert scale == torch.tensor(largest) / LARGEST
        assert equal(quantised, (wanted[name].float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(F8)), name
    assert not engine["w"][40:].float().any()


@pytest.mark.trio
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
async def test_mxfp8_has_the_bits_of_torch(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("expecttest")  # of torch's own tests, which its reference for MX formats lies among
    package.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", package)
    from torch.testing._internal.common_quantized import to_mxfp

    weights = {"w": random(64, 160).to(dtype)}
    wanted = (weights["w"].clone() * 3).bfloat16()
    engine = {"w": torch.zeros(64, 160).to(F8), "w_scale": torch.zeros(64, 5, dtype=torch.uint8)}
    await applied(weights, engine, rules=[Rule(source="w", convert="mxfp8", arrives="bfloat16")])
    scales, quantised = to_mxfp(wanted, 32, "mxfp8")
    assert equal(engine["w"], quantised) and equal(engine["w_scale"], scales.view(torch.uint8).view(64, 5))


@pytest.mark.trio
async def test_a_function_of_the_user_makes_tensors_of_another_shape() -> None:
    weights = {"w": torch.randint(-8, 8, (16, 32)).float()}
    wanted = weights["w"].clone() * 3
    places: list[Any] = []

    def halves(weight: Any) -> Sequence[Any]:
        places.append(weight.dtype)
        return weight[:, ::2].to(torch.int32) * 16 + weight[:, 1::2].to(torch.int32), weight.abs().amax(0)

    engine = {
        "w": torch.zeros(16, 32, device="meta"),
        "w.packed": torch.zeros(16, 16, dtype=torch.int32),
        "w.largest": torch.zeros(32),
    }
    await applied(
        weights,
        engine,
        rules=[Rule(source="w", convert="halves")],
        conversions={"halves": Conversion(halves, (".packed", ".largest"))},
    )
    assert torch.equal(engine["w.packed"], (wanted[:, ::2] * 16 + wanted[:, 1::2]).int())
    assert torch.equal(engine["w.largest"], wanted.abs().amax(0))
    assert set(places) == {torch.float32}


@pytest.mark.trio
@pytest.mark.parametrize(
    ("rule", "engine", "text"),
    [
        (Rule(source="w", convert="nothing"), {}, "a rule names the conversion 'nothing', known are"),
        (Rule(source="w", convert="fp8-channel"), {}, "the rules name w_scale, which no rank of the engine has"),
        (
            Rule(source="w", convert="fp8-channel"),
            {"w_scale": torch.zeros(3)},
            r"w_scale: its conversion returns \(4, 1\) of torch.float32, the engine has \(3,\) of torch.float32",
        ),
        (
            Rule(source="w", convert="mxfp8"),
            {"w_scale": torch.zeros(4, 1, dtype=torch.uint8)},
            "MXFP8 needs columns that are a multiple of 32",
        ),
    ],
)
async def test_what_cannot_be_converted_is_refused_before_a_version_comes(
    rule: Rule, engine: dict[str, Any], text: str
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await applied({"w": torch.ones(4, 8)}, {"w": torch.zeros(4, 8).to(F8), **engine}, rules=[rule])
    assert raised.group_contains(ValueError, match=text, depth=None)


def test_an_arriving_type_needs_a_conversion() -> None:
    with pytest.raises(ValueError, match="arrives='bfloat16' needs a conversion"):
        Rule(source="w", arrives="bfloat16")
