"""Checks of what a fabric reports about itself: rails, statistics, who waits for what; and of watch words."""

from __future__ import annotations

from itertools import pairwise

import anyio

from asyncfabric import Waiting
from asyncfabric.testing.conformance.setting import MIB, FabricFactory, carried_address, carried_key, open_pair


async def check_rails_are_named(factory: FabricFactory) -> None:
    """`fabric.rails` is what was opened, never a silent fallback."""
    async with factory.open() as fabric:
        assert len(fabric.rails) == factory.rails
        for rail in fabric.rails:
            assert rail.provider and rail.up
        assert bytes(fabric.address) == bytes(carried_address(fabric))


async def check_statistics(factory: FabricFactory) -> None:
    """Ops and bytes add up, and the value is frozen."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(MIB)
        exposed, _ = await pair.poisoned(MIB)
        key = carried_key(exposed)
        before = pair.writer.statistics()
        for _ in range(10):
            result = await pair.writer.write(region, key, 0)
            assert result.duration > 0
            assert result.rails and set(result.rails) <= set(range(factory.rails))
        after = pair.writer.statistics()
        assert after.bytes_written - before.bytes_written == 10 * MIB
        assert after.ops_completed - before.ops_completed >= 10
        assert [peer.state for peer in after.peers] == ["connected"]


async def check_why(factory: FabricFactory) -> None:
    """`why()` names a wait that hangs: what, how much is there, how much is needed."""
    async with open_pair(factory) as pair:
        counter = pair.target.counter()
        await pair.writer.signal(await pair.peer(), counter.imm)
        await counter.wait(1)
        lines: list[Waiting] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(counter.wait, 7)
            while not lines:
                await anyio.lowlevel.checkpoint()
                lines = [line for line in pair.target.why() if line.need == 7]
            tasks.cancel_scope.cancel()
        assert lines[0].have == 1
        assert [line for line in pair.target.why() if line.need == 7] == []


async def check_trace(factory: FabricFactory) -> None:
    """Each transfer begins and ends once in the writer's trace, each count is in the target's; off, nothing is kept."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(4096)
        exposed, _ = await pair.poisoned(4096)
        key, counter = carried_key(exposed), pair.target.counter()
        await pair.writer.write(region, key, 0, imm=counter.imm)
        await counter.wait(1)
        assert pair.writer.take_trace() == pair.target.take_trace() == []
        pair.writer.set_trace(True)
        pair.target.set_trace(True)
        for _ in range(3):
            await pair.writer.write(region, key, 0, imm=counter.imm)
        await counter.wait(4)
        pair.writer.set_trace(False)
        pair.target.set_trace(False)
        await pair.writer.write(region, key, 0, imm=counter.imm)
        await counter.wait(5)
        reported = pair.writer.take_trace()
        begun = [event for event in reported if event.what == "start" and event.value == 4096]
        ended = [event for event in reported if event.what == "finish" and event.value == 4096]
        assert len({event.subject for event in begun}) == len(begun) == 3
        assert [event.subject for event in begun] == [event.subject for event in ended]
        assert all(begin.time_ns <= end.time_ns for begin, end in zip(begun, ended, strict=True))
        counted = [
            event for event in pair.target.take_trace() if (event.what, event.subject) == ("arrival", counter.imm)
        ]
        assert sum(event.value for event in counted) == 3


async def check_watch_words(factory: FabricFactory) -> None:
    """A 64-bit word that another thread stores to wakes its watcher; changes are coalesced and in order."""
    async with factory.open() as fabric, fabric.watch() as word:
        seen: list[tuple[int, int]] = []
        last = (1 << 64) - 1

        async def follow() -> None:
            async for old, new in word:
                seen.append((old, new))
                if new == last:
                    return

        def store() -> None:
            for value in (1, 2, 3, 1000, last):
                word.store(value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            await anyio.to_thread.run_sync(store)
        assert seen[0][0] == 0
        assert seen[-1][1] == last
        assert all(a[1] == b[0] for a, b in pairwise(seen)), seen
        assert all(old < new for old, new in seen), seen
