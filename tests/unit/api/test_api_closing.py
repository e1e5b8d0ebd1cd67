"""How a fabric ends: drained, cancelled, interrupted by Ctrl-C; idempotent; nothing usable afterwards (INV-2)."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio
from fabrics import Outcome, open_fake, open_pair, settled, waiting_for

import asyncfabric as af
from asyncfabric.testing import FakeEngine, FakeNetwork

pytestmark = pytest.mark.anyio


async def test_leaving_drains_what_nobody_awaited() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        transfer = p.writer.write(p.source[:100], p.key, 0)
        outcome = Outcome()
        tasks.start_soon(outcome.run, p.writer.aclose)
        await settled()
        assert p.writer.closed and not outcome.ended
        with pytest.raises(af.ClosedError):
            p.writer.write(p.source[:100], p.key, 0)
        p.network.deliver()
        await settled()
        assert outcome.ended and (await transfer).bytes == 100
        assert bytes(p.target.memory[:100]) == bytes(p.source.memory[:100])


async def test_leaving_by_an_exception_cancels_what_is_unposted_and_drains_the_rest() -> None:
    network = FakeNetwork(window=1)
    async with open_fake(network) as reader, anyio.create_task_group() as tasks:
        target = await reader.allocate(4096)
        kept: list[af.Transfer] = []

        async def program() -> None:
            async with open_fake(network) as writer:
                source = await writer.allocate(4096)
                await writer.connect(reader.address)
                network.hold = True
                kept.extend(writer.write(source[:100], target.key(), 0) for _ in range(3))
                raise LookupError("user code")

        outcome = Outcome()
        tasks.start_soon(outcome.run, program)
        await settled()
        assert not outcome.ended, "INV-2: left while a posted write could still read the memory"
        network.release()
        await settled()
        assert isinstance(outcome.error, LookupError)
        assert [transfer.bytes for transfer in kept] == [100, 0, 0]
        for transfer in kept[1:]:
            with pytest.raises(af.TransferError, match="cancelled"):
                await transfer


async def test_cancelling_aclose_stops_posting_drains_closes_and_goes_on() -> None:
    async with open_pair(hold=True, window=1) as p, anyio.create_task_group() as tasks:
        transfers = [p.writer.write(p.source[:100], p.key, 0) for _ in range(3)]
        outcome = Outcome()
        tasks.start_soon(outcome.run, p.writer.aclose)
        await settled()
        outcome.scope.cancel()
        await settled()
        assert not outcome.ended
        p.network.deliver(1)
        await settled()
        assert outcome.cancelled
        assert [transfer.bytes for transfer in transfers] == [100, 0, 0]
        await p.writer.aclose()


async def test_any_number_of_tasks_may_close_and_each_returns_when_it_is_closed() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        p.writer.write(p.source[:100], p.key, 0)
        closers = [Outcome() for _ in range(3)]
        for closer in closers:
            tasks.start_soon(closer.run, p.writer.aclose)
        await settled()
        closers[1].scope.cancel()
        await settled()
        assert not any(closer.ended for closer in closers)
        p.network.deliver()
        await settled()
        assert [closer.cancelled for closer in closers] == [False, True, False]
        assert all(closer.ended for closer in closers)
        await p.writer.aclose()


async def test_everything_is_closed_afterwards() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        peer = await p.writer.connect(p.reader.address)
        counter, other = p.writer.counter(), p.writer.counter()
        waiting = Outcome()
        tasks.start_soon(waiting.run, lambda: counter.wait(1))
        await settled()
        await p.writer.aclose()
        await settled()
        assert isinstance(waiting.error, af.ClosedError)
        for call in (
            lambda: p.writer.write(p.source[:1], p.key, 0),
            lambda: p.writer.write_pages(p.source, [], p.key, [], page_bytes=1),
            lambda: p.writer.signal(peer, 1),
            lambda: p.writer.send(peer, b""),
            p.writer.counter,
            p.writer.watch,
            p.writer.statistics,
            lambda: p.writer.rails,
            lambda: other.value,
            lambda: other.spin(1, 0.0),
            p.source.key,
            peer.statistics,
        ):
            with pytest.raises(af.ClosedError):
                call()
        for wait in (
            lambda: p.writer.connect(p.reader.address),
            lambda: p.writer.disconnect(peer),
            lambda: p.writer.warm([]),
            lambda: p.writer.register(bytearray(8)),
            lambda: p.writer.allocate(8),
            p.writer.wait_writable,
            p.source.revoke,
            lambda: other.wait(1),
            p.writer.messages().__anext__,
        ):
            with pytest.raises(af.ClosedError):
                await wait()
        other.close()
        await p.source.release()
        assert p.writer.why() == []
        assert p.source.tensor  # views stay harmless
        assert bytes(p.source.memory[:2]) == b"\x00\x01"


async def test_a_transfer_that_a_dead_engine_never_ends_is_closed() -> None:
    engines: list[FakeEngine] = []
    network = FakeNetwork()

    def make(config: af.FabricConfig) -> FakeEngine:
        engines.append(FakeEngine(config, network))
        return engines[-1]

    async with open_fake(network) as reader, af.open_fabric(engine_factory=make) as writer:
        target, source = await reader.allocate(64), await writer.allocate(64)
        await writer.connect(reader.address)
        network.hold = True
        transfer = writer.write(source, target.key(), 0)
        engines[0].kill()
        with pytest.raises(af.FabricError):
            await transfer


async def test_opening_twice_and_wrong_factories() -> None:
    network = FakeNetwork()
    opening = open_fake(network)
    async with opening:
        with pytest.raises(RuntimeError, match="entered already"):
            await opening.__aenter__()

    def broken(config: af.FabricConfig) -> Any:
        raise OSError("no such rail")

    with pytest.raises(OSError, match="no such rail"):
        async with af.open_fabric(engine_factory=broken):
            pass


def test_without_an_event_loop_there_is_no_fabric() -> None:
    opening = open_fake(FakeNetwork())
    with pytest.raises(RuntimeError, match="trio or asyncio"):
        opening.__aenter__().send(None)


async def _interrupted(raise_signal: Callable[[], None], log: list[str], times: int = 1) -> None:
    """Be interrupted while a transfer is in flight; the network delivers only after it was seen to go on waiting."""
    async with open_pair() as p:
        p.network.hold = True
        transfer = p.writer.write(p.source[:100], p.key, 0)

        async def interrupt() -> None:
            await settled()
            for _time in range(times):
                raise_signal()
                await settled()
            log.append("still waiting" if not transfer.done and "left" not in log else "left too early")
            p.network.release()

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope(shield=True):
                tasks.start_soon(_shielded, interrupt)
                try:
                    await waiting_for(transfer)
                finally:
                    log.append("left")
                    log.append("drained" if transfer.done else "in flight")


async def _shielded(call: Callable[[], Any]) -> None:
    with anyio.CancelScope(shield=True):
        await call()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_drains_under_trio_however_often_it_is_pressed(times: int) -> None:
    log: list[str] = []

    @trio.lowlevel.enable_ki_protection
    def raise_signal() -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(BaseException) as caught:  # a group around KeyboardInterrupt, or it alone
        trio.run(_interrupted, raise_signal, log, times)
    assert "KeyboardInterrupt" in repr(caught.value)
    assert log == ["still waiting", "left", "drained"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.run turns SIGINT into a cancellation from 3.11 on")
def test_ctrl_c_drains_under_asyncio() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(_interrupted(lambda: signal.raise_signal(signal.SIGINT), log))
    assert log == ["still waiting", "left", "drained"]
