"""Counters: waits with targets, peers, coalesced progress, spinning threads, closing; and watch words."""

from __future__ import annotations

import threading

import anyio
import pytest
from fabrics import Outcome, Pair, open_fake, open_pair, settled

import asyncfabric as af
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio


async def peer_of(p: Pair, fabric: af.Fabric) -> af.Peer:
    other = p.reader if fabric is p.writer else p.writer
    return await fabric.connect(other.address)


async def test_waits_end_at_their_own_targets() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        peer = await peer_of(p, p.writer)
        counter = p.reader.counter()
        outcomes = {target: Outcome() for target in (5, 2, 9, 2, 3)}
        for target, outcome in outcomes.items():
            tasks.start_soon(outcome.run, lambda target=target: counter.wait(target))
        await settled()
        for arrived in range(1, 10):
            await p.writer.signal(peer, counter.imm)
            await settled()
            assert {target for target, outcome in outcomes.items() if outcome.ended} == {
                target for target in outcomes if target <= arrived
            }
        assert outcomes[9].value == 9 and counter.value == 9
        assert await counter.wait(0) == 9


async def test_early_arrivals_count() -> None:
    async with open_pair() as p:
        peer = await peer_of(p, p.writer)
        for _ in range(3):
            await p.writer.signal(peer, 77)
        with p.reader.counter(77) as counter:
            assert counter.imm == 77 and await counter.wait(3) == 3


async def test_a_cancelled_wait_leaves_the_others() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        peer = await peer_of(p, p.writer)
        counter = p.reader.counter()
        first, second = Outcome(), Outcome()
        tasks.start_soon(first.run, lambda: counter.wait(1))
        tasks.start_soon(second.run, lambda: counter.wait(2))
        await settled()
        first.scope.cancel()
        await settled()
        assert first.cancelled and len(counter.waiters) == 1
        await p.writer.signal(peer, counter.imm)
        await p.writer.signal(peer, counter.imm)
        await settled()
        assert second.value == 2


async def test_progress_is_coalesced_and_ends_with_the_counter() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        peer = await peer_of(p, p.writer)
        counter = p.reader.counter()
        seen: list[int] = []

        async def watch() -> None:
            async for value in counter:
                seen.append(value)

        outcome = Outcome()
        tasks.start_soon(outcome.run, watch)
        await settled()
        for count in (1, 3, 2):
            for _ in range(count):
                p.writer.signal(peer, counter.imm)
            await settled()
        assert seen[-1] == 6 and seen == sorted(set(seen))
        assert not outcome.ended
        counter.close()
        await settled()
        assert outcome.ended and outcome.error is None
        with pytest.raises(af.ClosedError):
            await counter.wait(1)
        with pytest.raises(af.ClosedError):
            _ = counter.value
        counter.close()


@pytest.mark.parametrize("leads", [True, False])
async def test_closing_a_counter_wakes_who_waits_for_it(leads: bool) -> None:
    async with open_fake(FakeNetwork()) as fabric, anyio.create_task_group() as tasks:
        counter, other = fabric.counter(), fabric.counter()
        outcome, bystander = Outcome(), Outcome()
        for run, waits in (
            ((outcome, counter), (bystander, other)) if leads else ((bystander, other), (outcome, counter))
        ):
            tasks.start_soon(run.run, lambda waits=waits: waits.wait(1))
            await settled()
        counter.close()
        await settled()
        assert isinstance(outcome.error, af.ClosedError) and not bystander.ended
        peer = await fabric.connect(fabric.address)
        await fabric.signal(peer, other.imm)
        await settled()
        assert bystander.value == 1


async def test_a_lost_peer_ends_the_waits_that_declared_it_by_name() -> None:
    network = FakeNetwork()
    async with open_fake(network) as reader, anyio.create_task_group() as tasks:
        counter = reader.counter()
        declared, silent, satisfied = Outcome(), Outcome(), Outcome()
        async with open_fake(network) as writer:
            source = await reader.connect(writer.address)
            target = await writer.connect(reader.address)
            tasks.start_soon(declared.run, lambda: counter.wait(2, peers=[source]))
            tasks.start_soon(silent.run, lambda: counter.wait(2))
            tasks.start_soon(satisfied.run, lambda: counter.wait(1, peers=af.PeerGroup([source])))
            await settled()
            writer.signal(target, counter.imm)
        await settled()
        assert satisfied.value == 1, "what the peer sent before it was lost counts"
        assert isinstance(declared.error, af.PeerError)
        assert repr(source) in str(declared.error) and "1 of 2 arrivals" in str(declared.error)
        assert not silent.ended
        assert source.lost and source.statistics().state == "lost"
        with pytest.raises(af.PeerError, match="2 arrivals"):
            await counter.wait(2, peers=[source])
        assert await counter.wait(1, peers=[source]) == 1
        counter.close()
        with pytest.raises(TypeError, match="Peer objects"):
            await reader.counter().wait(1, peers=[3])  # type: ignore[list-item]


async def test_spinning_threads_see_arrivals_deadlines_and_close() -> None:
    async with open_pair() as p:
        peer = await peer_of(p, p.writer)
        counter = p.reader.counter()
        results: list[object] = []

        def spin(target: int, deadline: float) -> None:
            try:
                results.append(counter.spin(target, deadline))
            except af.FabricError as error:
                results.append(error)

        thread = threading.Thread(target=spin, args=(1, 20.0))
        thread.start()
        await p.writer.signal(peer, counter.imm)
        await anyio.to_thread.run_sync(thread.join)
        assert results == [1]
        with pytest.raises(af.TransferError, match="deadline passed"):
            counter.spin(2, 0.0)
        thread = threading.Thread(target=spin, args=(2, 20.0))
        thread.start()
        counter.close()
        await anyio.to_thread.run_sync(thread.join)
        assert isinstance(results[1], af.ClosedError)
        for deadline in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="deadline"):
                p.reader.counter().spin(1, deadline)


async def test_an_imm_has_one_counter_at_a_time_and_generations_after() -> None:
    async with open_pair() as p:
        peer = await peer_of(p, p.writer)
        first = p.reader.counter(5)
        with pytest.raises(af.BusyError, match="imm 5 is open already"):
            p.reader.counter(5)
        await p.writer.signal(peer, 5)
        first.close()
        with p.reader.counter(5) as second:
            assert second.value == 0


async def test_a_watch_word_yields_changes_from_here_and_from_threads() -> None:
    async with open_fake(FakeNetwork()) as fabric, anyio.create_task_group() as tasks:
        seen: list[tuple[int, int]] = []
        async with fabric.watch() as word:
            assert word.value == 0 and word.memory.tolist() == [0]

            async def watch() -> None:
                async for change in word:
                    seen.append(change)

            outcome, second = Outcome(), Outcome()
            tasks.start_soon(outcome.run, watch)
            await settled()
            tasks.start_soon(second.run, word.__anext__)
            await settled()
            assert isinstance(second.error, af.BusyError)
            word.store(3)
            await settled()
            thread = threading.Thread(target=word.store, args=(4,))
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
            await settled()
            word.memory[0] = 1 << 63
            while len(seen) < 3:
                await settled()
            assert seen == [(0, 3), (3, 4), (4, 1 << 63)]
            assert word.address > 0
            with pytest.raises(ValueError, match="value must be in"):
                word.store(1 << 64)
        await settled()
        assert isinstance(outcome.error, af.ClosedError)
        with pytest.raises(af.ClosedError):
            _ = word.value
        with pytest.raises(af.ClosedError):
            await word.__aenter__()
