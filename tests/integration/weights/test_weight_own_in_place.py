"""`shadow="none"`: versions arrive in an engine's own tensors, while it is paused, and never at another time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="ENGINES IN PLACE WERE NOT TRIED: torch is not installed")

from asyncfabric import BrokenError, FabricConfig  # noqa: E402
from asyncfabric.weights import Rule  # noqa: E402
from asyncfabric.weights.sender.pipeline import WeightSending  # noqa: E402
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


async def take_three(
    weights: Mapping[str, Any], engine: Mapping[str, Any], beside: set[str], **options: Any
) -> list[dict[str, Any]]:
    """Let three versions in; return the tensors after each. Their addresses stayed, and nothing came at other times.

    `beside` are the only ones that there is a second copy of.
    """
    join, found = LocalJoin(), []
    places, before = (
        {name: f(tensor) for name, tensor in engine.items()} for f in (torch.Tensor.data_ptr, torch.clone)
    )
    opened = open_receiver(engine, join, config=LOCAL, shadow="none", **options)
    async with training(weights, join) as begin, opened as receiver:
        (copy,) = receiver._replica.copies
        own = {tensor.data_ptr() for tensor in engine.values()}
        assert {name for name, memory in copy.items() if memory.ctypes.data not in own} == beside
        for version in (1, 2, 3):
            begin(version)
            assert await receiver.wait() == receiver.poll() == version
            await trio.sleep(0.05)  # in which what comes too early would come
            assert all(torch.equal(tensor, before[name]) for name, tensor in engine.items()), version
            assert await receiver.apply_in_place() == receiver.version == version
            before = {name: tensor.clone() for name, tensor in engine.items()}
            found.append(before)
    assert places == {name: tensor.data_ptr() for name, tensor in engine.items()}
    return found


@pytest.mark.trio
async def test_tensors_larger_than_what_comes_keep_the_rest() -> None:
    sizes = {"rows": (300, 8), "columns": (5, 7, 9), "odd": (3,), "same": (160, 1001)}
    rooms = {"rows": (320, 8), "columns": (5, 8, 16), "odd": (5,), "same": (160, 1001)}
    weights = {name: torch.randn(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    engine = {name: torch.full(room, UNTOUCHED, dtype=torch.bfloat16) for name, room in rooms.items()}
    for version, found in enumerate(await take_three(weights, engine, {"columns"}), 1):
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
        "d": storage[61:65],  # the end of "a", and the later name counts
        "embed": shared,
        "head": shared,
        "made": torch.zeros(16, 8, dtype=torch.float8_e4m3fn),
        "made_scale": torch.zeros(16, 1),
    }
    weights = {name: torch.randn(engine[name].shape) for name in ("a", "b", "c", "d", "embed", "made")}
    weights["head"] = weights["embed"].clone()
    before = {name: weight.clone() for name, weight in weights.items()}
    before["a"].view(-1)[60:] = before["d"]
    beside = {"b", "c", "d", "head", "made"}
    rules = (Rule(source="made", convert="fp8-channel"), Rule(source="(.*)", tensor=r"\1"))
    for version, found in enumerate(await take_three(weights, engine, beside, rules=rules), 1):
        for name in ("a", "b", "c", "d", "embed", "head"):
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


@pytest.mark.trio
async def test_a_call_that_is_cancelled_goes_on_in_the_next_one() -> None:
    """Rank 1 is at no boundary yet, so the version that rank 0 has let in cannot be whole."""
    join, own = LocalJoin(), [torch.zeros(4, 8) for _ in range(2)]
    with trio.fail_after(30):
        async with training({"w": torch.ones(8, 8)}, join) as begin, trio.open_nursery() as nursery:
            ranks: list[Any] = []

            async def serve(rank: int) -> None:
                opened = open_receiver({"w": own[rank]}, join, rank=rank, ranks=2, config=LOCAL, shadow="none")
                async with opened as receiver:
                    ranks.append(receiver)
                    await trio.sleep_forever()

            for rank in range(2):
                nursery.start_soon(serve, rank)
            begin(1)
            while len(ranks) < 2:  # noqa: ASYNC110  # they join by themselves
                await trio.sleep(0.01)
            for receiver in ranks:
                assert await receiver.wait() == 1
            with trio.move_on_after(0.1) as scope:
                await ranks[0].apply_in_place()
            assert scope.cancelled_caught and ranks[0].version == 0 and ranks[0].poll() == 1
            nursery.start_soon(ranks[1].apply_in_place)
            assert await ranks[0].apply_in_place() == 1
            assert all((one == 1).all() for one in own)
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_an_engine_that_lets_nothing_in_is_left_out_until_it_does() -> None:
    """It keeps what it has, is waited for once, and gets the version after the boundary that it reaches."""
    join, weight, own = LocalJoin(), torch.ones(8, 8), torch.zeros(8, 8)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve_with_a_shadow() -> None:
                async with open_receiver({"w": torch.zeros(8, 8)}, join, name="other", config=LOCAL) as receiver:
                    while True:
                        await receiver.wait()
                        receiver.apply()

            async def train(*, task_status: Any) -> None:
                async with open_sender({"w": weight}, join, config=LOCAL, boundary_s=1.0) as sender:
                    task_status.started(sender)
                    await trio.sleep_forever()

            nursery.start_soon(serve_with_a_shadow)
            sender = await nursery.start(train)
            async with open_receiver({"w": own}, join, config=LOCAL, shadow="none") as receiver:

                async def publish(version: int) -> set[str]:
                    weight.fill_(version)
                    return set((await sender.publish(version)).receivers)

                async def let_in() -> None:
                    await receiver.wait()
                    await receiver.apply_in_place()

                async def both(version: int) -> set[str]:
                    nursery.start_soon(let_in)
                    return await publish(version)

                assert await both(1) == {"other/0", "engine/0"}
                assert await publish(2) == await publish(3) == {"other/0"}, "the second time nobody waits"
                assert (own == 1).all() and receiver.version == 1 and receiver.poll() == 2
                assert await receiver.apply_in_place() == 1, "it is over"
                version, came = 3, set[str]()
                while "engine/0" not in came:  # once its report of the boundary has come
                    version += 1
                    came = await both(version)
                assert (own == version).all() and receiver.version == version
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_after_a_version_that_was_cut_off_nothing_comes_before_it_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join, weight, own, noticed = LocalJoin(), torch.ones(64, 64), torch.zeros(64, 64), trio.Event()

    def changed(sending: WeightSending) -> None:
        raise BrokenError("weights changed")

    async def train() -> None:
        async with open_sender({"w": weight}, join, config=LOCAL) as sender:
            for version in (1, 2, 3):
                weight.fill_(version)
                with monkeypatch.context() as patch:
                    if version == 2:  # when all is written, and the last rows are not reported
                        patch.setattr(WeightSending, "_check_unchanged", changed)
                        with pytest.raises(BrokenError, match="weights changed"):
                            await sender.publish(version)
                        await noticed.wait()  # else the call that is cut off goes on with the next version
                    else:
                        await sender.publish(version)
            await trio.sleep_forever()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            async with open_receiver({"w": own}, join, config=LOCAL, shadow="none") as receiver:
                await receiver.wait()
                assert await receiver.apply_in_place() == 1
                assert await receiver.wait() == 2
                with pytest.raises(BrokenError, match=r"hold parts of several versions now: .*weights changed"):
                    await receiver.apply_in_place()
                assert receiver.version == 0 and (own == 2).any()
                own.fill_(UNTOUCHED)
                noticed.set()
                assert await receiver.wait() == 3
                await trio.sleep(0.05)
                assert (own == UNTOUCHED).all()
                assert await receiver.apply_in_place() == 3 and (own == 3).all()
            nursery.cancel_scope.cancel()
