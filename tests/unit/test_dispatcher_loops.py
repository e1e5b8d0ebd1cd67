"""What only one event loop can do to a wait: asyncio's own cancellations and timeouts, engines that refuse to sleep."""

from __future__ import annotations

import asyncio

import anyio
import pytest
import trio
from fabrics import Outcome, open_fake, open_pair, settled, waiting_for

import asyncfabric as af
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine, FakeNetwork


def test_asyncio_cancelling_many_times_still_drains() -> None:
    async def main() -> None:
        async with open_pair(hold=True) as p:
            transfer = p.writer.write(p.source[:100], p.key, 0)
            task = asyncio.get_running_loop().create_task(waiting_for(transfer))
            for _time in range(3):
                await settled()
                task.cancel()
            await settled()
            assert not task.done(), "INV-2: a second cancel() ended the drain"
            p.network.deliver()
            await settled()
            assert task.cancelled() and transfer.done

    asyncio.run(main())


def test_asyncio_timeouts_end_after_the_drain() -> None:
    async def main() -> None:
        async with open_pair(hold=True) as p:
            transfer = p.writer.write(p.source[:100], p.key, 0)
            delivered: list[bool] = []

            def deliver() -> None:
                delivered.append(transfer.done)
                p.network.release()

            asyncio.get_running_loop().call_later(0.03, deliver)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await transfer
            assert delivered == [False] and transfer.done

    asyncio.run(main())


class Wakeful(FakeEngine):
    """An engine that refuses to sleep `refusals` times, as if completions for others poured in."""

    refusals = 0
    armed = 0

    def arm(self) -> bool:
        if self.refusals > 0:
            self.refusals -= 1
            return False
        self.armed += 1
        return super().arm()


@pytest.mark.anyio
async def test_an_engine_that_refuses_to_sleep_does_not_starve_the_others() -> None:
    network = FakeNetwork()
    engines: list[Wakeful] = []

    def make(config: FabricConfig) -> Wakeful:
        engines.append(Wakeful(config, network))
        return engines[-1]

    async with af.open_fabric(engine_factory=make) as fabric, anyio.create_task_group() as tasks:
        peer = await fabric.connect(fabric.address)
        counter = fabric.counter()
        engine = engines[0]
        engine.refusals = 1 << 30
        waiter, other = Outcome(), Outcome()
        turns: list[int] = []

        async def count() -> None:
            for turn in range(100):
                turns.append(turn)
                await anyio.lowlevel.checkpoint()
            engine.refusals = 0

        tasks.start_soon(waiter.run, lambda: counter.wait(1))
        tasks.start_soon(other.run, count)
        while engine.refusals:
            await anyio.lowlevel.checkpoint()
        await settled()
        assert len(turns) == 100 and not waiter.ended
        fabric.signal(peer, counter.imm)
        await settled()
        assert waiter.value == 1


def test_each_event_loop_has_fabrics_of_its_own() -> None:
    async def main() -> None:
        async with open_fake(FakeNetwork()) as fabric:
            region = await fabric.allocate(64)
            await fabric.write(region[:8], region.key(), 8)

    for _time in range(2):
        trio.run(main)
        asyncio.run(main())
