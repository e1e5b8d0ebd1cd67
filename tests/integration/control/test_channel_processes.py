"""Channels between processes, over links and over a TCPStore (with fabrics, too): order, kill -9, who comes back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Process

Start = Callable[[str], Process]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["link", "store", "store+fabric"])]
WINDOW = 8
LONG = 3_000_000  # bytes: several parts, so that a kill also cuts a message


@pytest.fixture
def start(kind: str, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a member; the first one holds the directory or the store."""
    if kind != "link":
        pytest.importorskip("torch.distributed", reason="stores need torch")
    place: Any = "" if kind == "link" else 0
    with ExitStack() as stack:

        def start(name: str) -> Process:
            nonlocal place
            process = stack.enter_context(Process("channel_member.py"))
            process.send(kind=kind, name=name, place=place, window=WINDOW, folder=str(tmp_path / "s"))
            place = process.receive()["place"] if not place else (process.receive() and place)
            return process

        yield start


def events(process: Process, count: int) -> list[Any]:
    found: list[Any] = process.ask("take", count=count)["events"]
    return found


def until_lost(process: Process) -> list[Any]:
    """Return the events up to the first loss: a killed process takes along what its socket did not have yet."""
    found = events(process, 1)
    while not str(found[-1][1]).startswith("lost: "):
        found += events(process, 1)
    return found


def test_messages_in_order_both_ways_beyond_the_window(start: Start) -> None:
    a, b = start("a"), start("b")
    assert events(a, 1) == [["b", "found"]]
    assert events(b, 1) == [["a", "found"]]
    for source, to, name, other in ((a, b, "a", "b"), (b, a, "b", "a")):
        source.send(do="send", to=other, count=30, length=600_000)
        assert events(to, 30) == [[name, [number, 600_000]] for number in range(30)]
        assert source.receive() == {}
    b.ask("leave")
    ((peer, lost),) = events(a, 1)
    assert peer == "b" and lost.startswith("lost: ")
    for process in (b, a):
        process.close()


def test_a_killed_process_is_lost_once_after_its_last_message_and_comes_back_anew(start: Start) -> None:
    a, b = start("a"), start("b")
    assert events(a, 1) == [["b", "found"]]
    assert events(b, 1) == [["a", "found"]]
    b.ask("send", to="a", count=5, length=LONG)
    assert events(a, 1) == [["b", [0, LONG]]]
    b.send_signal(signal.SIGKILL)
    *came, (peer, lost) = until_lost(a)
    assert came == [["b", [number, LONG]] for number in range(1, 1 + len(came))]
    assert peer == "b" and lost.startswith("lost: ")
    assert a.fail("send", to="b", count=1, length=1)["error"] == "PeerError"
    again = start("b")
    assert events(a, 1) == [["b", "found"]]
    assert events(again, 1) == [["a", "found"]]
    again.ask("send", to="a", count=3, length=10)
    assert events(a, 3) == [["b", [number, 10]] for number in range(3)]
    for process in (again, a):
        process.close()
