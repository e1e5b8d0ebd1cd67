"""Notes of the NIXL face that leave with the bytes of their transfers, on a network that holds and fails its work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from nixl_agents import Agent, notes_of, until

from asyncfabric import Peer
from asyncfabric.integrations.nixl import _bindings as bind
from asyncfabric.integrations.nixl import caretaker, slot_messages
from asyncfabric.integrations.nixl.early_notes import SLOTS_OF_A_SENDER
from asyncfabric.integrations.nixl.note_slots import NoteSlots
from asyncfabric.integrations.nixl.notes import EARLY_BYTES
from asyncfabric.integrations.nixl.slot_messages import Purpose, SlotEntry
from asyncfabric.testing import FakeNetwork

Held = tuple[FakeNetwork, Agent, Agent]


def granted(a: Agent, b: Agent) -> None:
    """Have one noted WRITE end, after which the agent has its slots."""
    a.ended(a.made("WRITE", (0, 8), b, (0, 8), b"first"))
    notes_of(b, 1, (a,))
    until(lambda: not any((b.get_new_notifs(), a.get_new_notifs())) and free_slots(a) == SLOTS_OF_A_SENDER)


def free_slots(agent: Agent) -> int:
    """Return how many slots of its only remote agent are free."""
    slots = agent._core.remote("bb").slots
    return 0 if slots is None else len(slots)


def test_slots_learn_which_writes_end_within_their_calls() -> None:
    slots = NoteSlots(cast(Peer, None))
    for size, at_once, bound in [(64, False, 0), (64, True, 64), (8, True, 64), (4096, True, 4096), (512, False, 511)]:
        slots.learn(size, at_once=at_once)
        assert slots.at_once_bytes == bound


def test_a_write_that_ends_within_its_call_takes_no_slot_until_one_does_not() -> None:
    network = FakeNetwork()
    a, b = Agent("a", network), Agent("bb", network)
    a.meets(b)
    granted(a, b)
    slots = a._core.remote("bb").slots
    assert slots is not None and slots.at_once_bytes == 8
    handle = a.made("WRITE", (0, 8), b, (0, 8), b"again")
    network.hold = True
    assert a.transfer(handle) == "PROC" and free_slots(a) == SLOTS_OF_A_SENDER and slots.at_once_bytes == 7
    network.release()
    until(lambda: a.check_xfer_state(handle) == "DONE")
    network.hold = True
    assert a.transfer(handle, b"early") == "PROC" and free_slots(a) == SLOTS_OF_A_SENDER - 1
    network.release()
    assert notes_of(b, 2, (a,)) == {"a": [b"again", b"early"]}
    a.close()
    b.close()


@pytest.fixture
def held() -> Iterator[Held]:
    network = FakeNetwork()
    a, b = Agent("a", network), Agent("bb", network)
    a.meets(b)
    granted(a, b)
    network.hold = True
    yield network, a, b
    network.release()
    a.close()
    b.close()


def test_a_note_that_is_there_before_its_bytes_waits_for_them() -> None:
    network = FakeNetwork(seed=7)  # messages and writes overtake each other
    a, b = Agent("a", network), Agent("bb", network)
    a.meets(b)
    granted(a, b)
    network.hold = True
    waited = 0
    for turn in range(40):
        a.memory[:64] = turn
        handle = a.made("WRITE", (0, 64), b, (turn * 64, 64), b"%d" % turn)
        assert a.transfer(handle) == "PROC"
        network.deliver(1)
        assert b.get_new_notifs() == {}  # one of the two is missing
        waited += b._core.exchange.early.waiting
        network.deliver()
        assert b.get_new_notifs() == {"a": [b"%d" % turn]}
        assert (b.memory[turn * 64 : turn * 64 + 64] == turn).all()
        assert a.check_xfer_state(handle) == "DONE"
    assert waited  # some came before their bytes
    network.release()
    a.close()
    b.close()


def test_the_note_needs_no_call_of_its_sender(held: Held) -> None:
    network, a, b = held
    pages = [(offset, 64) for offset in range(0, 4096, 192)]
    local = a.get_xfer_descs(a.rows(*pages), "DRAM")
    remote = a.get_xfer_descs(b.rows(*reversed(pages)), "DRAM")
    handle = a.initialize_xfer("WRITE", local, remote, "bb", b"pages")
    for _ in range(3):  # the count goes on from transfer to transfer
        assert a.transfer(handle) == "PROC"
        network.deliver()
        assert b.get_new_notifs() == {"a": [b"pages"]}
        assert a.check_xfer_state(handle) == "DONE" and free_slots(a) == SLOTS_OF_A_SENDER


def test_a_failed_transfer_withdraws_its_note_and_its_slot_is_replaced(held: Held) -> None:
    network, a, b = held
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"never")
    for _ in range(3):
        a.transfer(handle)
        network.fail_next()
        network.deliver()
        assert not b.get_new_notifs() and b._core.exchange.early.waiting
        with pytest.raises(bind.nixlBackendError, match="WRITE to agent 'bb'"):
            a.check_xfer_state(handle)
        network.deliver()
        assert not b.get_new_notifs() and not b._core.exchange.early.waiting
        network.deliver()
        a.get_new_notifs()
        assert free_slots(a) == SLOTS_OF_A_SENDER
    for turn in range(2 * SLOTS_OF_A_SENDER):  # each slot is used, also those that came anew
        note = b"%d" % turn
        assert a.transfer(handle, note) == "PROC"
        network.deliver()
        assert b.get_new_notifs() == {"a": [note]} and a.check_xfer_state(handle) == "DONE"


def test_a_released_transfer_withdraws_its_note(held: Held) -> None:
    network, a, b = held
    network.window = 1
    blocks = [(0, 64), (640, 32)]  # two lengths: two writes, of which the second is not posted
    local, remote = a.get_xfer_descs(a.rows(*blocks), "DRAM"), a.get_xfer_descs(b.rows(*blocks), "DRAM")
    handle = a.initialize_xfer("WRITE", local, remote, "bb", b"never")
    a.transfer(handle)
    network.hold = False
    a._core.drop(handle._request)
    handle._released = True
    network.release()
    until(lambda: not a._core.leftovers or not caretaker.tend(a._core))
    a.send_notif("bb", b"last")
    assert notes_of(b, 1, (a,)) == {"a": [b"last"]}
    until(lambda: not b.get_new_notifs() and not a.get_new_notifs() and free_slots(a) == SLOTS_OF_A_SENDER)
    assert not b._core.exchange.early.waiting and b._core.exchange.early.dropped == 1


def test_a_dropped_handle_withdraws_its_note(held: Held) -> None:
    network, a, b = held
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"never")
    a.transfer(handle)
    network.fail_next()
    network.deliver()
    assert not b.get_new_notifs() and b._core.exchange.early.waiting
    del handle
    gc.collect()
    caretaker.tend(a._core)
    network.release()
    assert not b.get_new_notifs() and not b._core.exchange.early.waiting and not a._core.noted


def test_the_notes_of_a_lost_sender_are_dropped_and_its_counters_closed(held: Held) -> None:
    network, a, b = held
    early = b._core.exchange.early
    handle = a.made("WRITE", (0, 64), b, (64, 64), b"never")
    other = a.made("WRITE", (0, 64), b, (640, 64), b"whole")
    a.transfer(handle)
    network.fail_next()
    network.deliver()
    a.transfer(other)
    network.deliver()
    network.release()
    a.close()
    b._core.exchange._look_at_senders = 0.0  # the next look is the one that finds it lost
    found: list[bytes] = []
    until(lambda: found.extend(b.get_new_notifs().get("a", [])) or not early.waiting)
    assert found == [b"whole"] and not list(early.peers) and early.dropped == 1
    del handle, other


def test_with_every_slot_taken_notes_are_late_and_none_is_lost(held: Held) -> None:
    network, a, b = held
    count = SLOTS_OF_A_SENDER + 5
    handles = [a.made("WRITE", (n * 16, 16), b, (n * 16, 16), b"%d" % n) for n in range(count)]
    assert {a.transfer(handle) for handle in handles} == {"PROC"} and free_slots(a) == 0
    network.deliver()
    assert len(b.get_new_notifs()["a"]) == SLOTS_OF_A_SENDER
    assert {a.check_xfer_state(handle) for handle in handles} == {"DONE"}
    network.deliver()
    assert b.get_new_notifs() == {"a": [b"%d" % n for n in range(SLOTS_OF_A_SENDER, count)]}


@pytest.mark.parametrize(("operation", "note"), [("READ", b"short"), ("WRITE", bytes(EARLY_BYTES + 1))])
def test_reads_and_long_notes_are_late(held: Held, operation: str, note: bytes) -> None:
    network, a, b = held
    handle = a.made(operation, (0, 64), b, (64, 64), note)
    a.transfer(handle)
    assert free_slots(a) == SLOTS_OF_A_SENDER
    network.release()
    assert a.check_xfer_state(handle) == "DONE"
    assert notes_of(b, 1, (a,)) == {"a": [note]}


def test_the_longest_early_note_fits_into_its_message(held: Held) -> None:
    network, a, b = held
    note = np.random.default_rng(1).bytes(EARLY_BYTES)
    a.transfer(a.made("WRITE", (0, 64), b, (64, 64), note))
    assert free_slots(a) == SLOTS_OF_A_SENDER - 1
    network.deliver()
    assert b.get_new_notifs() == {"a": [note]}


def test_messages_about_slots_are_read_as_they_were_packed_and_others_refused() -> None:
    for purpose, entries in ((Purpose.ASK, []), (Purpose.GRANT, [SlotEntry(1, 2), SlotEntry(1 << 63, 1 << 20)])):
        packed = slot_messages.pack(purpose, entries)
        assert slot_messages.read(packed) == (purpose, tuple(entries))
        assert slot_messages.read(packed + b"x") is None and slot_messages.read(packed[:-1]) is None
    assert slot_messages.read(b"AS\x01\x09\x00") is None and slot_messages.read(b"AS\x02\x01\x00") is None
