"""Transfers of the NIXL face on a network that holds its work: states, releases, dropped handles, failures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from nixl_agents import Agent, notes_of

from asyncfabric.integrations.nixl import _bindings as bind
from asyncfabric.integrations.nixl import caretaker
from asyncfabric.testing import FakeNetwork


@pytest.fixture
def held() -> Iterator[tuple[FakeNetwork, Agent, Agent]]:
    network = FakeNetwork()
    a, b = Agent("a", network), Agent("bb", network)
    a.meets(b)
    network.hold = True
    yield network, a, b
    network.release()
    a.close()
    b.close()


def test_under_way_it_is_proc_and_cannot_be_posted_again(held: tuple[FakeNetwork, Agent, Agent]) -> None:
    network, a, b = held
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"note")
    assert a.transfer(handle) == "PROC" == a.check_xfer_state(handle)
    with pytest.raises(bind.nixlRepostActiveError, match="under way"):
        a.transfer(handle)
    network.deliver()
    assert a.check_xfer_state(handle) == "DONE"
    assert not b.get_new_notifs()  # the note leaves when the data has arrived, and is held itself
    network.deliver()
    assert b.get_new_notifs() == {"a": [b"note"]}


def test_a_release_cancels_and_returns_when_the_memory_is_free(held: tuple[FakeNetwork, Agent, Agent]) -> None:
    network, a, b = held
    network.window = 1
    before = b.memory.copy()
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"never")
    other = a.made("WRITE", (0, 64), b, (640, 64), b"never")
    assert a.transfer(handle) == "PROC" == a.transfer(other)
    a.release_xfer_handle(other)  # nothing of it was posted
    network.release()
    a.release_xfer_handle(handle)
    assert (b.memory[640:704] == before[640:704]).all()
    network.hold = False
    a.send_notif("bb", b"last")
    assert notes_of(b, 1, (a,)) == {"a": [b"last"]}


def test_a_release_that_cannot_drain_reports_it_and_keeps_the_handle(
    held: tuple[FakeNetwork, Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, a, b = held
    handle = a.made("READ", (0, 64), b, (64, 64))
    a.transfer(handle)
    transfer = handle._request._transfers[0]
    monkeypatch.setattr(type(transfer), "wait", _never)
    with pytest.raises(bind.nixlBackendError, match="not drained"):
        a.release_xfer_handle(handle)
    monkeypatch.undo()
    network.release()
    a.release_xfer_handle(handle)


def _never(transfer: Any, deadline: float | None = None) -> Any:
    raise TimeoutError(f"{transfer!r} has not ended after {deadline} s")


def test_a_dropped_handle_is_cancelled_and_kept_until_it_drained(held: tuple[FakeNetwork, Agent, Agent]) -> None:
    network, a, b = held
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"never")
    a.transfer(handle)
    assert len(a._core.noted) == 1
    del handle
    gc.collect()
    assert len(a._core.leftovers) == 1
    assert caretaker.tend(a._core)
    network.release()
    caretaker.tend(a._core)
    assert not a._core.leftovers and not a._core.noted
    assert not b.get_new_notifs()


def test_the_caretaker_sends_the_notes_of_transfers_that_nobody_polls(
    held: tuple[FakeNetwork, Agent, Agent],
) -> None:
    network, a, b = held
    handle = a.made("READ", (0, 64), b, (64, 64), b"read")
    a.transfer(handle)
    assert caretaker.tend(a._core) and not b.get_new_notifs()
    network.release()
    assert not caretaker.tend(a._core)
    assert b.get_new_notifs() == {"a": [b"read"]}
    assert a.check_xfer_state(handle) == "DONE"


def test_a_note_that_does_not_arrive_is_reported(
    held: tuple[FakeNetwork, Agent, Agent], caplog: pytest.LogCaptureFixture
) -> None:
    network, a, b = held
    a.send_notif("bb", b"lost")
    assert "note to agent 'bb'" in a._core.fabric.why_text()
    network.fail_next()
    a.send_notif("bb", b"next")
    network.release()
    caretaker.tend(a._core)
    assert caplog.text.count("a note to agent 'bb' did not arrive") == 1
    assert b.get_new_notifs() == {"a": [b"next"]} and not a._core.fabric.why()


def test_a_failed_transfer_raises_its_error_each_time_and_sends_no_note(
    held: tuple[FakeNetwork, Agent, Agent],
) -> None:
    network, a, b = held
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"never")
    a.transfer(handle)
    network.fail_next()
    network.release()
    for _ in range(2):
        with pytest.raises(bind.nixlBackendError, match="WRITE to agent 'bb'"):
            a.check_xfer_state(handle)
    assert not b.get_new_notifs()
    assert a.transfer(handle) == "DONE"  # a failed transfer can be posted again
    assert b.get_new_notifs() == {"a": [b"never"]}
