"""Frames that wait for room in a ZeroMQ socket leave when there is room, whoever took the news of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import zmq

from asyncfabric.control import LinkConfig, open_link
from asyncfabric.control.pump import Pump

pytestmark = pytest.mark.anyio
BODY = b"." * 8000
PATIENCE_S = 5.0


@pytest.mark.parametrize("way", ["dealer", "router"])
async def test_frames_leave_also_when_the_news_of_room_was_taken_by_a_question(tmp_path: Path, way: str) -> None:
    """Each send and each read asks the socket too. Without heartbeats, which look at everything every half second."""
    config = LinkConfig(ipc_folder=str(tmp_path / "s"), heartbeat_s=600.0, peer_deadline_s=1800.0, high_water_frames=1)
    async with open_link("a", config=config) as a, open_link("b", config=config) as b:
        await a.connect(b.address)
        while not b.peers():
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        sender, receiver = (a, b) if way == "dealer" else (b, a)
        wire: Any = sender._board.wire
        path = sender._table.names.peers[receiver.identity].way_out.path
        socket = (wire._taps[path][0] if isinstance(path, int) else wire._router).socket
        while wire.has_room(path):  # the loop stands still, so nobody reads at the other end
            assert sender._send_nowait(receiver.identity, "x", BODY, None), "the window is to be larger than the pipes"
        while not socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            receiver._board.wire.drain()
        # Nobody listens on "x", so no credit comes back: nothing else makes the socket readable.
        with anyio.fail_after(PATIENCE_S):
            await sender._board.room(receiver.identity)
        assert wire.has_room(path)


async def test_what_waits_is_tried_again_without_an_edge() -> None:
    silent, other = os.pipe()
    tries = 0
    enough = anyio.Event()

    def flush() -> bool:
        nonlocal tries
        tries += 1
        if tries == 3:
            enough.set()
        return True

    pump = Pump(silent, lambda: False, flush, lambda: None)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump.run)
            with anyio.move_on_after(PATIENCE_S):
                await enough.wait()
            pump.close()
        assert tries >= 3
    finally:
        os.close(silent)
        os.close(other)
