"""Notes: sent alone and with transfers, their order and keys, drained and kept, on both faces."""

from __future__ import annotations

from typing import Any

import pytest
from two_agents import TwoAgents, eventually, notes_of


def test_notes_have_names_and_are_drained(two: TwoAgents) -> None:
    assert two.b.get_new_notifs() == {}
    two.a.send_notif("b", b"one")
    two.a.send_notif("b", "zwei \u00e9")
    assert notes_of(two.b, 2) == {"a": [b"one", "zwei \u00e9".encode()]}
    assert two.b.get_new_notifs() == {} and two.b.get_new_notifs(["UCX"]) == {}


def test_notes_carry_any_bytes(two: TwoAgents) -> None:
    sent = [b"", b"\xff\x00\x01", b"z" * 100_000]
    for note in sent:
        two.a.send_notif("b", note)
    assert notes_of(two.b, 3) == {"a": sent}


def test_notes_keep_their_order(two: TwoAgents) -> None:
    sent = [b"%d" % index for index in range(1000)]
    for note in sent:
        two.a.send_notif("b", note)
    assert notes_of(two.b, 1000) == {"a": sent}


def test_notes_go_both_ways_and_to_oneself(two: TwoAgents) -> None:
    two.b.send_notif("a", b"back")
    two.b.send_notif("b", b"self")
    assert notes_of(two.a, 1) == {"b": [b"back"]} and notes_of(two.b, 1) == {"b": [b"self"]}


def test_notes_name_a_backend(two: TwoAgents) -> None:
    if two.face.differs("note-backend"):
        two.a.send_notif("b", b"x", "UCX")
        assert notes_of(two.b, 1) == {"a": [b"x"]}
    else:
        with pytest.raises(TypeError):
            two.a.send_notif("b", b"x", "UCX")


def test_notes_that_cannot_be_sent(two: TwoAgents) -> None:
    with pytest.raises(two.face.error("NotFound")):
        two.a.send_notif("nobody", b"x")
    for note in (None, 3):
        with pytest.raises(TypeError):
            two.a.send_notif("b", note)
    with pytest.raises(KeyError):
        two.a.send_notif("b", b"x", "NOPE")
    with pytest.raises(KeyError):
        two.b.get_new_notifs(["NOPE"])


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_note_comes_after_the_bytes_of_its_transfer(two: TwoAgents, operation: str) -> None:
    handle = two.made(operation, length=1 << 19, note=b"moved")
    for turn in range(10):
        (two.source if operation == "WRITE" else two.target)[: 1 << 19] = turn
        two.a.transfer(handle)

        def came() -> bool:
            two.a.check_xfer_state(handle)
            found = two.b.get_new_notifs()
            assert found in ({}, {"a": [b"moved"]})
            return bool(found) and two.same(0, 1 << 19)

        assert eventually(came)
        assert two.a.check_xfer_state(handle) in ("DONE", "PROC")
        while two.a.check_xfer_state(handle) == "PROC":
            pass


def test_the_note_of_a_handle_is_replaced_and_kept(two: TwoAgents) -> None:
    handle = two.made(note=b"first")
    for argument, expected in (((), b"first"), ((b"second",), b"second"), ((), b"second"), (("\u00e9",), b"\xc3\xa9")):
        assert two.ran(handle, *argument) == "DONE"
        assert notes_of(two.b, 1) == {"a": [expected]}


def test_a_transfer_without_a_note_sends_none(two: TwoAgents) -> None:
    assert two.ran(two.made()) == "DONE"
    two.a.send_notif("b", b"fence")
    assert notes_of(two.b, 1) == {"a": [b"fence"]}


def test_prepared_transfers_carry_notes(two: TwoAgents) -> None:
    local, remote = two.pages("", 4096, 4), two.pages("b", 4096, 4)
    handle = two.a.make_prepped_xfer("WRITE", local, [0, 2], remote, [1, 3], b"pages")
    assert two.ran(handle) == "DONE"
    assert notes_of(two.b, 1) == {"a": [b"pages"]}


def test_kept_notes_are_looked_up(two: TwoAgents) -> None:
    def kept(count: int) -> bool:
        return eventually(lambda: sum(map(len, two.b.update_notifs().values())) == count)

    two.a.send_notif("b", b"u1")
    assert kept(1) and two.b.notifs == {"a": [b"u1"]}
    two.a.send_notif("b", b"u2")
    assert kept(2) and two.b.update_notifs() == {"a": [b"u1", b"u2"]}
    assert two.b.get_new_notifs() == {}
    assert two.b.check_remote_xfer_done("a", b"u")
    assert two.b.notifs == {"a": [b"u2"]}
    assert not two.b.check_remote_xfer_done("a", b"2")
    assert two.b.check_remote_xfer_done("a", b"2", tag_is_prefix=False)
    assert not two.b.check_remote_xfer_done("a", b"u") and not two.b.check_remote_xfer_done("nobody", b"u")
    assert two.b.update_notifs() == {"a": []}


def test_notes_nobody_drains_do_not_stop_transfers(two: TwoAgents) -> None:
    handle: Any = two.made(length=64, note=b"n" * 100)
    for _ in range(500):
        assert two.ran(handle) == "DONE"
    assert notes_of(two.b, 500) == {"a": [b"n" * 100] * 500}
