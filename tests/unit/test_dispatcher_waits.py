"""No wake-up is lost: leaders that leave, followers that are promoted and cancelled, wakes from outside of a drain.

The random programs choose the interleaving by a seed: tasks wait for counters and transfers, are cancelled at random
points, and everybody whose condition came true must be awake when nothing moves any more.
"""

from __future__ import annotations

import random

import anyio
import pytest
from fabrics import Outcome, open_fake, open_pair, settled, waiting_for

import asyncfabric as af
from asyncfabric._bridge.engine import Completion
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("cancelled", range(4))
async def test_whoever_leaves_the_others_are_still_woken(cancelled: int) -> None:
    async with open_fake(FakeNetwork()) as fabric, anyio.create_task_group() as tasks:
        peer = await fabric.connect(fabric.address)
        counters = [fabric.counter() for _ in range(4)]
        outcomes = [Outcome() for _ in counters]
        for outcome, counter in zip(outcomes, counters, strict=True):
            tasks.start_soon(outcome.run, lambda counter=counter: counter.wait(1))
            await settled()
        outcomes[cancelled].scope.cancel()
        await settled()
        for position in (3, 0, 2, 1):
            fabric.signal(peer, counters[position].imm)
            await settled()
            assert outcomes[position].ended
        assert [outcome.value for outcome in outcomes] == [None if i == cancelled else 1 for i in range(4)]


async def test_a_promoted_task_that_is_cancelled_or_ready_hands_on() -> None:
    async with open_fake(FakeNetwork()) as fabric, anyio.create_task_group() as tasks:
        peer = await fabric.connect(fabric.address)
        counters = [fabric.counter() for _ in range(5)]
        outcomes = [Outcome() for _ in counters]
        for outcome, counter in zip(outcomes, counters, strict=True):
            tasks.start_soon(outcome.run, lambda counter=counter: counter.wait(1))
            await settled()
        # In one turn of the loop: the first ends, and those that would lead next are cancelled or closed.
        fabric.signal(peer, counters[0].imm)
        outcomes[1].scope.cancel()
        counters[2].close()
        await settled()
        assert outcomes[1].cancelled and isinstance(outcomes[2].error, af.ClosedError)
        for position in (4, 3):
            fabric.signal(peer, counters[position].imm)
            await settled()
            assert outcomes[position].value == 1


async def test_thousand_waits_wake_the_loop_a_handful_of_times() -> None:
    async with open_pair(af.FabricConfig(max_ops=2048), hold=True) as p, anyio.create_task_group() as tasks:
        transfers = [p.writer.write(p.source[:8], p.key, 0) for _ in range(1000)]
        for transfer in transfers:
            tasks.start_soon(waiting_for, transfer)
        await settled()
        before = p.writer.statistics().loop_wakes
        p.network.deliver()
        await settled()
        assert all(transfer.done for transfer in transfers)
        assert p.writer.statistics().loop_wakes - before <= 4


async def test_idle_fabrics_are_not_woken() -> None:
    async with open_pair(hold=True) as p:
        transfers = [p.writer.write(p.source[:8], p.key, 0) for _ in range(10)]
        before = p.writer.statistics().loop_wakes
        p.network.deliver()
        await settled()
        assert p.writer.statistics().loop_wakes == before
        await af.wait_all(transfers)


async def test_two_fabrics_of_one_loop_do_not_mix() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        to_reader = await p.writer.connect(p.reader.address)
        to_writer = await p.reader.connect(p.writer.address)
        mine, yours = p.writer.counter(), p.reader.counter()
        rounds = 50

        async def play(fabric: af.Fabric, counter: af.ImmCounter, peer: af.Peer, imm: int, first: bool) -> None:
            for turn in range(rounds):
                if first:
                    fabric.signal(peer, imm)
                await counter.wait(turn + 1)
                if not first:
                    fabric.signal(peer, imm)

        tasks.start_soon(play, p.writer, mine, to_reader, yours.imm, True)
        tasks.start_soon(play, p.reader, yours, to_writer, mine.imm, False)


@pytest.mark.parametrize("seed", range(12))
async def test_random_programs_leave_nobody_asleep(seed: int) -> None:
    chance = random.Random(seed)
    async with open_pair(seed=seed, hold=True) as p, anyio.create_task_group() as tasks:
        counters = [p.writer.counter() for _ in range(4)]
        peer = await p.reader.connect(p.writer.address)
        counts = [0] * len(counters)
        running: list[tuple[Outcome, int | None, int, af.Transfer | None]] = []
        for _step in range(120):
            kind = chance.randrange(6)
            outcome = Outcome()
            if kind == 0:
                which, target = chance.randrange(len(counters)), chance.randrange(1, 12)
                running.append((outcome, which, target, None))
                tasks.start_soon(outcome.run, lambda c=counters[which], t=target: c.wait(t))
            elif kind == 1:
                transfer = p.writer.write(p.source[: chance.randrange(64)], p.key, 0)
                running.append((outcome, None, 0, transfer))
                tasks.start_soon(outcome.run, lambda transfer=transfer: waiting_for(transfer))
            elif kind == 2:
                which = chance.randrange(len(counters))
                counts[which] += 1
                p.reader.signal(peer, counters[which].imm)
            elif kind == 3 and running:
                chance.choice(running)[0].scope.cancel()
            elif kind == 4:
                p.network.deliver(chance.randrange(4))
            else:
                await anyio.lowlevel.checkpoint()
        p.network.release()
        await settled()
        for outcome, which, target, transfer in running:
            if transfer is not None:
                assert outcome.ended, f"seed {seed}: nobody woke the task of {transfer!r}"
            elif which is not None and counts[which] >= target:
                assert outcome.ended, (
                    f"seed {seed}: counter {which} is at {counts[which]}, the wait for {target} sleeps"
                )
        for outcome, *_ in running:
            outcome.scope.cancel()


async def test_why_names_who_waits_for_what_and_from_whom() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        assert p.writer.why() == [] and p.writer.why_text() == "nobody waits for anything"
        transfer = p.writer.write(p.source[:100], p.key, 0)
        peer = await p.writer.connect(p.reader.address)
        counter = p.writer.counter()
        outcomes = [Outcome(), Outcome(), Outcome()]
        tasks.start_soon(outcomes[0].run, lambda: counter.wait(3, peers=[peer]))
        await settled()
        tasks.start_soon(outcomes[1].run, lambda: waiting_for(transfer))
        await settled()
        tasks.start_soon(outcomes[2].run, p.writer.messages().__anext__)
        await settled()
        count, write, message = p.writer.why()
        assert (count.have, count.need, count.missing_from) == (0, 3, (repr(peer),))
        assert (write.have, write.need, write.missing_from) == (100, 100, (repr(peer),))
        assert write.detail["outstanding"] == 1 and "write of 100 bytes" in write.what
        assert message.what == "messages()"
        assert count.since <= write.since
        text = p.writer.why_text()
        assert "0 of 3" in text and repr(peer) in text and len(text.splitlines()) == 3
        p.network.release()
        for outcome in outcomes:
            outcome.scope.cancel()


class Interrupting:
    """A sink that Ctrl-C hits the first time it is called, between two of its lines."""

    def __init__(self) -> None:
        self.left = 1
        self.calls = 0

    def complete(self, _: Completion) -> None:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt

    def abandon(self) -> None:
        raise AssertionError("it was completed")

    def waiting(self) -> list[af.Waiting]:
        return []


async def test_ctrl_c_while_completions_are_handed_out_loses_none() -> None:
    async with open_pair(hold=True) as p:
        dispatcher = p.writer._dispatcher
        transfers = [p.writer.write(p.source[:8], p.key, 0) for _ in range(3)]
        sink = Interrupting()
        cookie = next(cookie for cookie, parked in dispatcher.parked.items() if parked is transfers[1])
        dispatcher.parked[cookie] = sink
        p.network.deliver()
        with pytest.raises(KeyboardInterrupt):
            dispatcher.drain()
        assert sink.calls == 2 and transfers[0].done and transfers[2].done
