"""Weights in three calls within one process: what comes when, and what is refused."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="WEIGHTS IN THREE CALLS WERE NOT RUN: torch is not installed")

from asyncfabric import BrokenError, FabricConfig  # noqa: E402
from asyncfabric.weights import Rule  # noqa: E402
from asyncfabric.weights.sessions import LocalJoin, StoreJoin, engines, open_receiver, open_sender  # noqa: E402
from asyncfabric.weights.sessions.engines import APPEAR_S  # noqa: E402
from asyncfabric.weights.sessions.layouts import DESERTED_S  # noqa: E402

LOCAL = FabricConfig(rails=("local",))


@pytest.mark.trio
async def test_an_engine_applies_what_is_whole_when_it_wants_to() -> None:
    join, weight = LocalJoin(), torch.zeros(300, 8)
    own = torch.full((320, 8), -1.0)
    applied = trio.Event()

    async def train() -> None:
        async with open_sender({"w": weight}, join, config=LOCAL) as sender:
            for version in (1, 2):
                weight.fill_(float(version))
                await sender.publish(version)
            await applied.wait()
            with pytest.raises(BrokenError, match="version 2"):
                await sender.publish(2)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            async with open_receiver({"w": own}, join, config=LOCAL) as receiver:
                assert receiver.version == receiver.poll() == 0
                assert await receiver.wait() in (1, 2)
                assert (own == -1).all(), "only apply touches the engine's tensors"
                while receiver.apply() < 2:
                    assert (own[:300] == receiver.version).all()
                    await receiver.wait()
                assert (own[:300] == 2).all() and (own[300:] == -1).all()
                assert receiver.poll() == 0 and receiver.apply() == 2
                applied.set()


class FarStore:
    """A store that takes a while to answer."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            time.sleep(0.003)
            return real(*arguments)

        return call


@pytest.mark.trio
async def test_rank_0_ends_as_soon_as_its_version_is_published_and_the_others_have_it_all_the_same() -> None:
    store, serving, ended = FarStore(torch.distributed.HashStore()), [], trio.Event()

    async def train(rank: int) -> None:
        part = {"w": ((8, 8), (4 * rank, 0))}
        async with open_sender(
            {"w": torch.ones(4, 8)}, StoreJoin(store), rank=rank, ranks=2, parts=part, config=LOCAL
        ) as sender:
            report = await sender.publish(1)
            assert report.receivers
            serving.append(rank)
            if len(serving) == 2:
                ended.set()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train, 0)
            nursery.start_soon(train, 1)
            async with open_receiver({"w": torch.zeros(8, 8)}, StoreJoin(store), config=LOCAL) as receiver:
                await receiver.wait()
                await ended.wait()
    assert sorted(serving) == [0, 1]


@pytest.mark.trio
async def test_a_training_that_is_killed_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none while it runs, unless it was given a log."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    join, weight = LocalJoin(), torch.ones(4, 8)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def train() -> None:
                async with open_sender({"w": weight}, join, config=LOCAL) as sender:
                    await sender.publish(1)
                    assert os.listdir(tmp_path) == []

            nursery.start_soon(train)
            async with open_receiver({"w": torch.zeros(4, 8)}, join, config=LOCAL) as receiver:
                await receiver.wait()


@pytest.mark.trio
async def test_what_does_not_fit_is_refused_at_both_ends() -> None:
    join, refused = LocalJoin(), []

    async def end(opened: Any) -> None:
        try:
            async with opened:
                pass
        except ValueError as error:
            refused.append(str(error))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, open_sender({"w": torch.zeros(4, 8)}, join, config=LOCAL))
            nursery.start_soon(end, open_receiver({"v": torch.zeros(4, 8)}, join, config=LOCAL))
    assert refused == ["the rules name w, which no rank of the engine has (1 of such tensors)"] * 2


@pytest.mark.trio
async def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
        async with open_receiver({"w": torch.zeros(4)}, LocalJoin(), config=LOCAL, rank=2, ranks=2):
            pass
    with pytest.raises(ValueError, match="is no regular expression: missing"):
        Rule(source="(")


@pytest.mark.trio
async def test_a_sender_wants_a_rank_and_ranks_or_neither() -> None:
    with pytest.raises(ValueError, match="give both rank and ranks, or neither"):
        async with open_sender({"w": torch.zeros(4)}, LocalJoin(), rank=1):
            pass


@pytest.mark.trio
@pytest.mark.parametrize("shape", [(64, 8), (32, 8)], ids=["alike", "of another layout"])
async def test_a_version_goes_on_without_an_engine_that_reaches_no_boundary(shape: tuple[int, int]) -> None:
    """It is waited for once, keeps the version that it has whole, and gets later ones when it is there again."""
    join, weight, joined, ended = LocalJoin(), torch.zeros(64, 8), trio.Event(), trio.Event()
    prompt_joined = trio.Event()
    prompt, late = torch.zeros(64, 8), [torch.zeros(shape) for _ in range(64 // shape[0])]
    receivers: dict[int, Any] = {}
    reports: list[tuple[set[str], float]] = []

    async def publish(sender: Any, version: int) -> None:
        weight.fill_(float(version))
        began_s = trio.current_time()
        report = await sender.publish(version)
        reports.append(({name.partition("/")[0] for name in report.receivers}, trio.current_time() - began_s))

    async def serve(rank: int) -> None:
        opened = open_receiver({"w": late[rank]}, join, name="late", rank=rank, ranks=len(late), config=LOCAL)
        async with opened as receivers[rank]:
            if len(receivers) == len(late):
                joined.set()
            await ended.wait()

    async def keep_up(receiver: Any) -> None:
        while True:
            await receiver.wait()
            receiver.apply()

    async def step() -> None:
        for rank in range(len(late)):
            await receivers[rank].wait()
            receivers[rank].apply()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for rank in range(len(late)):
                nursery.start_soon(serve, rank)
            sender = open_sender({"w": weight}, join, config=LOCAL, boundary_s=4.0)
            async with trio.open_nursery() as engines:
                opened = open_receiver({"w": prompt}, join, name="prompt", config=LOCAL)

                async def serve_promptly() -> None:
                    async with opened as receiver:
                        prompt_joined.set()
                        await keep_up(receiver)

                engines.start_soon(serve_promptly)
                async with sender as training:
                    await joined.wait()
                    await prompt_joined.wait()
                    for version in (1, 2, 3):  # the late engine has the first one and does not apply it
                        await publish(training, version)
                    assert [names for names, _ in reports] == [{"prompt", "late"}, {"prompt"}, {"prompt"}]
                    assert reports[1][1] >= 4.0 > reports[2][1], "an engine that is late is waited for once"
                    await step()
                    assert all((one == 1).all() for one in late), "it kept the first one"
                    if shape == (64, 8):
                        await step()  # from the engine that is laid out alike
                        assert (late[0] == 3).all()
                    version = 3
                    while "late" not in reports[-1][0]:  # once its report of the boundary has come
                        version += 1
                        await publish(training, version)
                    await step()
                    assert all((one == version).all() for one in late)
                    ended.set()
                    engines.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_rank_that_is_lost_for_long_is_waited_for_no_more() -> None:
    """Not once for each layout of engines, and not anew for each version."""
    join, left = LocalJoin(), trio.CancelScope()
    state, parts = {"w": torch.zeros(2, 8)}, [{"w": ((4, 8), (2 * rank, 0))} for rank in range(2)]

    async def follow() -> None:
        with left:
            async with open_sender(state, join, rank=1, ranks=2, parts=parts[1], config=LOCAL) as sender:
                await sender.publish(1)
                await trio.sleep_forever()

    async def serve(dtype: Any) -> None:
        own = {"w": torch.zeros(4, 8, dtype=dtype)}
        async with open_receiver(own, join, name=str(dtype), config=LOCAL) as receiver:
            await receiver.wait()
            receiver.apply()
            await trio.sleep_forever()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            for dtype in (torch.float32, torch.bfloat16):  # two layouts
                nursery.start_soon(serve, dtype)
            async with open_sender(state, join, rank=0, ranks=2, parts=parts[0], config=LOCAL) as sender:
                await sender.publish(1)
                left.cancel()
                await trio.sleep(DESERTED_S + 0.5)
                for version in (2, 3):
                    with trio.fail_after(APPEAR_S), pytest.raises(BrokenError, match="trainer-1 is lost"):
                        await sender.publish(version)
                nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_version_waits_for_the_other_ranks_of_an_engine_that_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one of its ranks would have the version and another one the version before."""
    monkeypatch.setattr(engines, "BACK_S", 30.0)  # opening a receiver takes a second on a loaded machine
    join, scopes, versions = LocalJoin(), {}, itertools.count(1)

    async def publish() -> set[str]:
        return set((await sender.publish(next(versions))).receivers)

    async def serve(name: str, rank: int, ranks: int, *, task_status: Any) -> None:
        own = {"w": torch.zeros(8 // ranks, 8)}
        with trio.CancelScope() as scopes[name, rank]:
            async with open_receiver(own, join, name=name, rank=rank, ranks=ranks, config=LOCAL) as receiver:
                task_status.started()
                while True:
                    await receiver.wait()
                    receiver.apply()

    async def serve_later() -> None:
        await trio.sleep(0.3)
        await nursery.start(serve, "halves", 1, 2)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for place in (("whole", 0, 1), ("halves", 0, 2), ("halves", 1, 2)):
                    starting.start_soon(nursery.start, serve, *place)
                sender = await nursery.start(_train, join)
            assert await publish() == {"whole/0", "halves/0", "halves/1"}
            for rank in range(2):
                scopes["halves", rank].cancel()
            while await publish() != {"whole/0"}:
                pass
            await nursery.start(serve, "halves", 0, 2)
            nursery.start_soon(serve_later)
            assert await publish() == {"whole/0", "halves/0", "halves/1"}
            nursery.cancel_scope.cancel()


async def _train(join: LocalJoin, *, task_status: Any) -> None:
    async with open_sender({"w": torch.ones(8, 8)}, join, config=LOCAL) as sender:
        task_status.started(sender)
        await trio.sleep_forever()
