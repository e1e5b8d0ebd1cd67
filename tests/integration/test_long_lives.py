"""What a fabric keeps of what is over, after thousands of it: peers that came and went, writes that were refused."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import asyncfabric as af

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = [pytest.mark.slow, pytest.mark.trio]
RESTING = 1024  # lost peers that the engine still knows (PeerList::kMostResting)
PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not holds():  # noqa: ASYNC110  # statistics have no event to wait for
            await anyio.sleep(0.001)


async def test_peers_that_came_and_went_are_forgotten() -> None:
    config = af.FabricConfig(rails=("local",))
    async with af.open_fabric(config) as near, af.open_fabric(config) as far:
        first = await near.connect(far.address)
        await near.disconnect(first)
        for _ in range(RESTING + 100):
            await near.disconnect(await near.connect(far.address))
        for fabric in (near, far):
            await until(lambda fabric=fabric: len(fabric.statistics().peers) <= RESTING + 1)
        gc.collect()
        names = sum(isinstance(each, af.Peer) for each in gc.get_objects())
        assert names < 20, f"{names} names of peers that nobody holds"

        assert first.lost  # forgotten by the engine, and still a name
        with pytest.raises(af.PeerError):
            await near.send(first, b"x")
        await near.disconnect(first)
        counter = near.counter()
        with pytest.raises(af.PeerError), anyio.fail_after(5):
            await counter.wait(1, peers=[first])
        again = await near.connect(far.address)
        assert not again.lost
        await near.send(again, b"still here")
        async for message in far.messages():
            assert message.payload == b"still here" and not message.peer.lost
            break


async def test_a_peer_that_is_named_after_it_was_lost_is_lost() -> None:
    config = af.FabricConfig(rails=("local",))
    async with af.open_fabric(config) as near, af.open_fabric(config) as far:
        peer = await near.connect(far.address)
        await near.send(peer, b"the last word")
        await until(lambda: far.statistics().messages_received == 1)
        await near.disconnect(peer)
        await until(lambda: far.statistics().peers[0].state != "connected")
        counter = far.counter()
        async for message in far.messages():
            assert message.peer.lost
            with pytest.raises(af.PeerError), anyio.fail_after(5):
                await counter.wait(1, peers=[message.peer])
            break


async def test_refused_writes_leave_nothing_behind() -> None:
    """What each was to wait for took a hundred bytes, for good."""
    config = af.FabricConfig(rails=("local",), max_ops=1)
    async with af.open_fabric(config) as writer, af.open_fabric(config) as target, writer.watch() as word:
        source, exposed = await writer.allocate(4096), await target.allocate(4096)
        key = exposed.key()
        await writer.write(source[:1], key, 0)
        waits = writer.write(source, key, 0, after=word.reaches(1))

        def refused(times: int) -> None:
            for _ in range(times):
                try:
                    writer.write(source, key, 0, after=word.reaches(1))
                except af.BusyError:
                    continue
                raise AssertionError("there is one place, and it is taken")

        refused(2_000)
        before = _resident()
        refused(50_000)
        with pytest.raises(af.BusyError):
            writer.write_pages(source, [0], key, [0], page_bytes=64, after=word.reaches(1))
        grown = _resident() - before
        assert grown < 2 << 20, f"{grown} bytes more than before"
        word.store(1)
        await waits
