"""What an engine's own tensors may be: views, tied, larger than what comes, of odd sizes; their addresses stay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="AN ENGINE'S OWN TENSORS WERE NOT TRIED: torch is not installed")

from asyncfabric import FabricConfig  # noqa: E402
from asyncfabric.weights.sessions import LocalJoin, WeightReceiver, open_receiver, open_sender  # noqa: E402

LOCAL = FabricConfig(rails=("local",))
UNTOUCHED = -1.0


@asynccontextmanager
async def published(weights: Mapping[str, Any], engine: Any, **options: Any) -> AsyncIterator[WeightReceiver]:
    """Publish weights as version 1, and then twice as large as version 2 once version 1 is applied."""
    join = LocalJoin()

    async def train() -> None:
        async with open_sender(weights, join, config=LOCAL) as sender:
            await sender.publish(1)
            while receiver.version < 1:  # noqa: ASYNC110  # the test applies it
                await trio.sleep(0.01)
            for weight in weights.values():
                weight.mul_(2)
            await sender.publish(2)
            await trio.sleep_forever()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            async with open_receiver(engine, join, config=LOCAL, **options) as receiver:
                yield receiver
                nursery.cancel_scope.cancel()


async def apply_both(weights: Mapping[str, Any], engine: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Apply both versions; return what the engine's tensors were after each. Their addresses stayed."""
    places, found = {name: tensor.data_ptr() for name, tensor in engine.items()}, []
    async with published(weights, engine, **options) as receiver:
        for version in (1, 2):
            while receiver.version < version:
                await receiver.wait()
                receiver.apply()
            assert receiver.version == version
            found.append({name: tensor.clone() for name, tensor in engine.items()})
    assert places == {name: tensor.data_ptr() for name, tensor in engine.items()}
    return found


@pytest.mark.trio
@pytest.mark.parametrize("shadow", ["host", "device", "cpu"])
async def test_tensors_larger_than_what_comes_keep_the_rest(shadow: str) -> None:
    sizes = {"rows": (300, 8), "columns": (5, 7, 9), "odd": (3,), "experts": (4, 6, 10), "same": (16, 16)}
    rooms = {"rows": (320, 8), "columns": (5, 8, 16), "odd": (5,), "experts": (6, 8, 10), "same": (16, 16)}
    weights = {name: torch.randn(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    engine = {name: torch.full(room, UNTOUCHED, dtype=torch.bfloat16) for name, room in rooms.items()}
    for version, found in enumerate(await apply_both(weights, engine, shadow=shadow), 1):
        for name, tensor in found.items():
            wanted = torch.full(rooms[name], UNTOUCHED, dtype=torch.bfloat16)
            wanted[tuple(slice(side) for side in sizes[name])] = before[name] * version
            assert torch.equal(tensor, wanted), (version, name)


@pytest.mark.trio
async def test_views_of_one_storage_are_filled_each_for_itself() -> None:
    storage = torch.full((3 * 64 + 5,), UNTOUCHED)
    engine = {
        "a": storage[1:65].view(8, 8),  # begins in the middle of a word of eight bytes
        "b": storage[66:130].view(8, 8).T,
        "c": storage[131:195].view(8, 8)[:, ::2],
    }
    weights = {name: torch.randn(tensor.shape) for name, tensor in engine.items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    for version, found in enumerate(await apply_both(weights, engine), 1):
        assert all(torch.equal(found[name], before[name] * version) for name in engine), version
    between = [0, 65, 130, 195, 196, *range(132, 195, 2)]
    assert (storage[between] == UNTOUCHED).all(), "what lies between the views was written"


@pytest.mark.trio
@pytest.mark.parametrize("names", [("embed",), ("embed", "head")], ids=["the trainer has one", "the trainer has both"])
async def test_tied_tensors_need_one_name_of_the_trainer(names: tuple[str, ...]) -> None:
    shared, weight = torch.zeros(20, 4), torch.randn(20, 4)
    before = weight.clone()
    engine = {"embed": shared, "head": shared, "norm": torch.zeros(4)}
    weights = {"norm": torch.ones(4), **{name: weight.clone() for name in names}}
    for version, found in enumerate(await apply_both(weights, engine), 1):
        assert torch.equal(found["embed"], before * version) and torch.equal(found["head"], before * version)


@pytest.mark.trio
async def test_a_tensor_that_no_name_fills_is_refused_though_others_are_tied() -> None:
    shared = torch.zeros(20, 4)
    engine = {"embed": shared, "head": shared, "norm": torch.zeros(4), "more": torch.zeros(20, 4)}
    with pytest.raises(ExceptionGroup) as raised:
        await apply_both({"norm": torch.ones(4), "embed": torch.zeros(20, 4)}, engine)
    assert raised.group_contains(ValueError, match="nothing of the trainer goes into more", depth=None)


@pytest.mark.trio
async def test_tensors_without_memory_are_taken_and_not_applied() -> None:
    weight = torch.arange(6.0).view(2, 3)
    async with published({"w": weight}, {"w": torch.zeros(2, 3, device="meta")}, shadow="cpu") as receiver:
        await receiver.wait()
        with pytest.raises(ValueError, match=r"w has no memory that a version could be copied into: use take\(\)"):
            receiver.apply()
        assert torch.equal(receiver.take()["w"], torch.arange(6.0).view(2, 3)) and receiver.version == 1


@pytest.mark.trio
@pytest.mark.parametrize(
    ("shadow", "device", "text"),
    [("gpu", "cpu", "shadow must be 'host', 'device' or the name of a device"), ("device", "meta", "these are on")],
)
async def test_a_shadow_that_is_no_place_is_refused_at_once(shadow: str, device: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        async with open_receiver({"w": torch.zeros(4, device=device)}, LocalJoin(), config=LOCAL, shadow=shadow):
            pass
