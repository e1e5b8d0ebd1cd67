"""`shadow="none"`: versions arrive in an engine's own tensors, while it is paused, and never at another time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="ENGINES IN PLACE WERE NOT TRIED: torch is not installed")

from asyncfabric import FabricConfig  # noqa: E402
from asyncfabric.weights import Rule  # noqa: E402
from asyncfabric.weights.sessions import CONVERSIONS, LocalJoin, open_receiver, open_sender  # noqa: E402

LOCAL = FabricConfig(rails=("local",))
UNTOUCHED = -1.0


@asynccontextmanager
async def training(weights: Mapping[str, Any], join: LocalJoin) -> AsyncIterator[Callable[[int], None]]:
    """Yield what begins to publish a version, which has the weights times its number; every version is decided."""
    before = {name: weight.clone() for name, weight in weights.items()}
    begin, wanted = trio.open_memory_channel[int](10)

    async def train() -> None:
        async with open_sender(weights, join, config=LOCAL) as sender:
            async for version in wanted:
                for name, weight in weights.items():
                    weight.copy_(before[name] * version)
                await sender.publish(version)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            yield begin.send_nowait
            nursery.cancel_scope.cancel()


async def take_three(weights: Mapping[str, Any], engine: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Let three versions in; return the tensors after each. Their addresses stayed, and nothing came at other times."""
    join, found = LocalJoin(), []
    places, before = (
        {name: f(tensor) for name, tensor in engine.items()} for f in (torch.Tensor.data_ptr, torch.clone)
    )
    async with training(weights, join) as begin:
        begin(1)
        async with open_receiver(engine, join, config=LOCAL, shadow="none", **options) as receiver:
            for version in (1, 2, 3):
                assert await receiver.wait() == receiver.poll() == version
                await trio.sleep(0.05)  # in which what comes too early would come
                assert all(torch.equal(tensor, before[name]) for name, tensor in engine.items()), version
                assert await receiver.apply_in_place() == receiver.version == version
                before = {name: tensor.clone() for name, tensor in engine.items()}
                found.append(before)
                begin(version + 1)
    assert places == {name: tensor.data_ptr() for name, tensor in engine.items()}
    return found


@pytest.mark.trio
async def test_tensors_larger_than_what_comes_keep_the_rest() -> None:
    sizes = {"rows": (300, 8), "columns": (5, 7, 9), "odd": (3,), "same": (160, 1001)}
    rooms = {"rows": (320, 8), "columns": (5, 8, 16), "odd": (5,), "same": (160, 1001)}
    weights = {name: torch.randn(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    engine = {name: torch.full(room, UNTOUCHED, dtype=torch.bfloat16) for name, room in rooms.items()}
    for version, found in enumerate(await take_three(weights, engine), 1):
        for name, tensor in found.items():
            wanted = torch.full(rooms[name], UNTOUCHED, dtype=torch.bfloat16)
            wanted[tuple(slice(side) for side in sizes[name])] = before[name] * version
            assert torch.equal(tensor, wanted), (version, name)


@pytest.mark.trio
async def test_views_tied_tensors_and_converted_ones_are_right_too() -> None:
    """What lies in pieces, has another one's bytes, or is made of what arrives, arrives beside."""
    storage, shared = torch.full((4 * 64 + 5,), UNTOUCHED), torch.zeros(20, 4)
    engine = {
        "a": storage[1:65].view(8, 8),
        "b": storage[66:130].view(8, 8).T,
        "c": storage[131:195].view(8, 8)[:, ::2],
        "embed": shared,
        "head": shared,
        "made": torch.zeros(16, 8, dtype=torch.float8_e4m3fn),
        "made_scale": torch.zeros(16, 1),
    }
    weights = {name: torch.randn(engine[name].shape) for name in ("a", "b", "c", "embed", "made")}
    weights["head"] = weights["embed"].clone()
    before = {name: weight.clone() for name, weight in weights.items()}
    rules = (Rule(source="made", convert="fp8-channel"), Rule(source="(.*)", tensor=r"\1"))
    for version, found in enumerate(await take_three(weights, engine, rules=rules), 1):
        for name in ("a", "b", "c", "embed", "head"):
            assert torch.equal(found[name], before[name] * version), (version, name)
        bits, scales = CONVERSIONS["fp8-channel"].function(before["made"] * version)
        assert torch.equal(found["made"].view(torch.uint8), bits.view(torch.uint8)), version
        assert torch.equal(found["made_scale"], scales), version
    between = [0, 65, 130, 195, 196, *range(132, 195, 2)]
    assert (storage[between] == UNTOUCHED).all(), "what lies between the views was written"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("shadow", "call", "text"),
    [("none", "apply", r"use apply_in_place\(\)"), ("host", "apply_in_place", r"use apply\(\)")],
)
async def test_the_wrong_call_is_refused(shadow: str, call: str, text: str) -> None:
    join = LocalJoin()
    async with (
        training({"w": torch.ones(4)}, join),
        open_receiver({"w": torch.zeros(4)}, join, config=LOCAL, shadow=shadow) as receiver,
    ):
        with pytest.raises(ValueError, match=text):
            found = getattr(receiver, call)()
            await found


@pytest.mark.trio
async def test_tensors_without_memory_are_refused_by_name() -> None:
    join = LocalJoin()
    with pytest.raises(ExceptionGroup) as raised:
        async with training({"w": torch.ones(4)}, join):
            await open_receiver({"w": torch.zeros(4, device="meta")}, join, config=LOCAL, shadow="none").__aenter__()
    assert raised.group_contains(ValueError, match="w has no memory that a version could arrive in", depth=None)
