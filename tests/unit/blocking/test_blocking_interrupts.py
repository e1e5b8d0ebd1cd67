"""Ctrl-C at every place of a wait: it ends that wait, and takes nothing from the others or from the fabric."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from blocking_pair import SOON_S, Call, HookedEngine, Pair, blocked, open_pair
from interrupts import CtrlC, at_every_place

import asyncfabric as af
from asyncfabric import blocking

TRIED = ("/_bridge/threads.py", "/_bridge/dispatcher.py", "/_bridge/pending.py", "/asyncfabric/blocking/")


def interrupted(call: Callable[[], Any], press: CtrlC) -> None:
    """Call with an interrupt pressed, and let it go by."""
    try:
        with press:
            call()
    except KeyboardInterrupt:
        assert press.came


@pytest.mark.parametrize("package", TRIED)
def test_a_wait_for_a_transfer_may_be_interrupted_anywhere(package: str) -> None:
    """Its completion has come, or comes while it sleeps; another thread waits for another one, as the follower."""
    with open_pair(hold=True) as p:

        def attempt(press: CtrlC) -> None:
            mine, other = (p.writer.write(p.source[:8], p.key, at) for at in (0, 8))
            p.engine.after_arm = lambda: (follows.append(Call(other.wait)), blocked(p.writer, 2), p.network.deliver())
            follows: list[Call] = []
            interrupted(mine.wait, press)
            p.engine.after_arm = None
            p.network.deliver()
            if not follows:
                follows.append(Call(other.wait))
            assert follows[0].result().bytes == mine.wait(SOON_S).bytes == 8
            blocked(p.writer, 0)

        assert at_every_place(attempt, package) > 1
        assert p.writer.why() == []


@pytest.mark.parametrize("package", TRIED)
def test_a_follower_may_be_interrupted_anywhere(package: str) -> None:
    with open_pair(hold=True) as p:

        def attempt(press: CtrlC) -> None:
            mine, other = (p.writer.write(p.source[:8], p.key, at) for at in (0, 8))
            leads = Call(other.wait)
            blocked(p.writer, 1)
            delivering = Call(lambda: (blocked_or_gone(p, pressing), p.network.deliver()))
            interrupted(mine.wait, press)
            pressing.set()
            delivering.result()
            assert leads.result().bytes == mine.wait(SOON_S).bytes == 8
            blocked(p.writer, 0)
            pressing.clear()

        pressing = threading.Event()
        assert at_every_place(attempt, package) >= 1


def blocked_or_gone(p: Pair, gone: threading.Event) -> None:
    """Return when two threads sleep, or when the one that was to be the second is gone."""
    while not gone.wait(0.0005):
        with p.writer._dispatcher.lock:
            if p.writer._dispatcher.adapter._followers:
                return


@pytest.mark.parametrize("package", [*TRIED, "/_api/counter.py", "/_api/messages.py", "/_api/control.py"])
def test_other_waits_may_be_interrupted_anywhere(package: str) -> None:
    with open_pair() as p:
        to_reader, to_writer = p.writer.connect(p.reader.address), p.reader.connect(p.writer.address)
        counter, stream = p.writer.counter(), p.writer.messages()
        counted = 0

        def attempt(press: CtrlC) -> None:
            nonlocal counted
            counted += 1
            p.reader.signal(to_writer, counter.imm).wait()
            p.engine.after_arm = lambda: p.reader.signal(to_writer, counter.imm)
            interrupted(lambda: (counter.wait(counted), counter.wait(counted + 1)), press)
            p.engine.after_arm = None
            while counter.value < 2 * counted:
                p.reader.signal(to_writer, counter.imm)
            assert counter.wait(2 * counted, deadline=SOON_S) == 2 * counted
            blocked(p.writer, 0)

        assert at_every_place(attempt, package) >= 0
        p.writer.signal(to_reader, p.reader.counter().imm).wait(SOON_S)
        p.reader.send(to_writer, b"x").wait(SOON_S)
        assert stream.receive(SOON_S).payload == b"x"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_leaving_the_block_may_be_interrupted_anywhere() -> None:
    """Whatever line Ctrl-C hits, the fabric is closed in the end and the transfer has ended."""

    def attempt(press: CtrlC) -> None:
        with open_pair() as p:
            opening = blocking.open_fabric(engine_factory=lambda config: HookedEngine(config, p.network))
            fabric = opening.__enter__()
            source = fabric.allocate(64)
            transfer = fabric.write(source, p.key, 0)
            interrupted(lambda: opening.__exit__(None, None, None), press)
            fabric.close()
            assert fabric._dispatcher.closed and transfer.done
            with pytest.raises(af.ClosedError):
                fabric.counter()

    assert at_every_place(attempt, "/_bridge/threads.py") > 10
    assert at_every_place(attempt, "/_api/closing.py") >= 0
    assert at_every_place(attempt, "/_bridge/dispatcher.py") > 10
