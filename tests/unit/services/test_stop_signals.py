"""Signals of a node: the first one drains, the second one ends at once, whatever the node had decided by itself."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.testing

pytest.importorskip("hypercorn", reason="services need hypercorn")

from asyncfabric_services.router.server import set_on_signals


@pytest.mark.parametrize("stopping", [False, True])
def test_only_the_second_signal_ends_a_node_at_once(stopping: bool) -> None:
    """A trainer rank stops when another one was ordered to: a SIGTERM that comes then is its first."""

    async def main() -> None:
        stop, scope = trio.Event(), trio.CancelScope()
        if stopping:
            stop.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_on_signals, stop, scope)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert not scope.cancel_called
            os.kill(os.getpid(), signal.SIGTERM)
            while not scope.cancel_called:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    trio.run(main)
