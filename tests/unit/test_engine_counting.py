"""The Engine protocol, counters and watch words: count first, arm later, generations, spinning. Fake and native."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest
from parties import Party, settles

from asyncfabric._bridge.engine import CompletionKind, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode

Pair = tuple[Party, Party]
MakeParties = Callable[..., list[Party]]


def signal(writer: Party, peer: int, imm: int, times: int = 1) -> None:
    """Count at a peer and wait until that is done."""
    for _ in range(times):
        cookie = writer.cookie()
        writer.engine.submit_signal(cookie, [peer], imm)
        writer.take_ok(cookie)


def test_arrivals_before_the_counter_are_kept(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    signal(writer, peer, 9, times=3)
    assert settles(reader, "early_arrivals", 3)
    counter, imm = reader.engine.open_counter(9)
    assert imm == 9
    assert reader.count_to(counter, 3) == 3
    signal(writer, peer, 9)
    assert reader.count_to(counter, 4) == 4


def test_a_target_that_was_passed_is_reached(pair: Pair) -> None:
    writer, reader = pair
    signal(writer, writer.connect(reader), 9, times=5)
    counter, _ = reader.engine.open_counter(9)
    assert reader.count_to(counter, 5) == 5
    assert reader.count_to(counter, 3) == 5


def test_late_arrivals_never_reach_the_next_user(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    counter, _ = reader.engine.open_counter(9)
    signal(writer, peer, 9)
    assert reader.count_to(counter, 1) == 1
    reader.engine.close_counter(counter)
    reader.engine.close_counter(counter)
    signal(writer, peer, 9, times=2)
    assert settles(reader, "stale_arrivals", 2)
    cookie = reader.cookie()
    reader.engine.arm_closed(cookie, 9)
    assert reader.take_ok(cookie).value == 9
    again, _ = reader.engine.open_counter(9)
    assert again != counter
    assert reader.engine.counter_value(again) == 0
    assert reader.engine.counter_value(counter) == 0


def test_picked_imms_are_free_and_come_back_late(pair: Pair) -> None:
    _, reader = pair
    named = reader.engine.open_counter(3)
    picked = [reader.engine.open_counter(-1) for _ in range(50)]
    assert len({imm for _, imm in [named, *picked]}) == 51
    for counter, _ in picked:
        reader.engine.close_counter(counter)
    fresh = [reader.engine.open_counter(-1)[1] for _ in range(50)]
    assert not {imm for _, imm in picked} & set(fresh)


def test_an_open_imm_is_not_opened_twice(pair: Pair) -> None:
    _, reader = pair
    reader.engine.open_counter(3)
    with pytest.raises(EngineStatusError) as caught:
        reader.engine.open_counter(3)
    assert caught.value.status_kind == StatusKind.BUSY


def test_arming_reports_once_and_the_newest_arming_wins(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    counter, imm = reader.engine.open_counter(-1)
    reader.engine.arm_counter(counter, 11, 1)
    reader.engine.arm_counter(counter, 12, 2)
    signal(writer, peer, imm, times=3)
    reported = reader.take(12)
    assert (reported.kind, reported.code) == (CompletionKind.COUNTER, StatusCode.OK)
    assert reported.value >= 2
    assert reader.count_to(counter, 3) == 3
    reader.gather()
    assert not [one for one in reader.seen if one.kind == CompletionKind.COUNTER]


def test_a_closed_counter_is_not_reported(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    counter, imm = reader.engine.open_counter(-1)
    reader.engine.arm_counter(counter, 11, 1)
    reader.engine.close_counter(counter)
    signal(writer, peer, imm)
    assert settles(reader, "stale_arrivals", 1)
    reader.gather()
    assert not [one for one in reader.seen if one.kind == CompletionKind.COUNTER and one.code == StatusCode.OK]
    with pytest.raises(EngineStatusError) as caught:
        reader.engine.arm_counter(counter, 12, 1)
    assert caught.value.status_kind == StatusKind.CLOSED


def test_spinning_ends_with_the_arrival_or_the_deadline(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    counter, imm = reader.engine.open_counter(-1)
    assert reader.engine.spin_counter(counter, 0, 0) == 0
    before = time.monotonic_ns()
    with pytest.raises(EngineStatusError) as caught:
        reader.engine.spin_counter(counter, 1, before + 20_000_000)
    assert caught.value.code == StatusCode.TIMEOUT
    assert time.monotonic_ns() - before >= 20_000_000
    values: list[int] = []
    thread = threading.Thread(
        target=lambda: values.append(reader.engine.spin_counter(counter, 2, time.monotonic_ns() + 20_000_000_000))
    )
    thread.start()
    signal(writer, peer, imm, times=2)
    thread.join(20)
    assert values == [2]


def test_closing_ends_a_spin(pair: Pair) -> None:
    _, reader = pair
    counter, _ = reader.engine.open_counter(-1)
    refusals: list[EngineStatusError] = []

    def spin() -> None:
        try:
            reader.engine.spin_counter(counter, 1, time.monotonic_ns() + 20_000_000_000)
        except EngineStatusError as refusal:
            refusals.append(refusal)

    thread = threading.Thread(target=spin)
    thread.start()
    reader.engine.close_counter(counter)
    thread.join(20)
    assert [refusal.status_kind for refusal in refusals] == [StatusKind.CLOSED]


def test_many_threads_count_exactly(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(4096), reader.allocate(4096)
    key = writer.key_of(reader, target)
    counter, imm = reader.engine.open_counter(-1)

    def submit(first: int) -> None:
        for number in range(first, first + 100):
            writer.engine.submit_write(number, source, 0, 64, key, 0, imm)

    threads = [threading.Thread(target=submit, args=(10_000 * (1 + one),)) for one in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in range(4):
        for number in range(100):
            writer.take_ok(10_000 * (1 + one) + number)
    assert reader.count_to(counter, 400) == 400


def test_a_watch_reports_every_kind_of_store(make_parties: MakeParties) -> None:
    (party,) = make_parties(1)
    watch, address = party.engine.open_watch()
    word = ctypes.c_uint64.from_address(address)
    assert party.engine.watch_load(watch) == word.value == 0
    party.engine.arm_watch(watch, 51, 0)
    party.engine.watch_store(watch, 2**64 - 1)
    reported = party.take(51)
    assert (reported.kind, reported.value, word.value) == (CompletionKind.WATCH, 2**64 - 1, 2**64 - 1)
    party.engine.arm_watch(watch, 52, 2**64 - 1)
    word.value = 7  # as a GPU kernel would: nobody is reported
    assert party.take(52).value == 7
    party.engine.arm_watch(watch, 53, 1)  # differs already
    assert party.take(53).value == 7
    party.engine.close_watch(watch)
    party.engine.close_watch(watch)
    for call in (party.engine.watch_load, lambda one: party.engine.arm_watch(one, 1, 0)):
        with pytest.raises(EngineStatusError) as caught:
            call(watch)
        assert caught.value.status_kind == StatusKind.CLOSED


def test_a_closed_watch_is_not_reported(make_parties: MakeParties) -> None:
    (party,) = make_parties(1)
    first, _ = party.engine.open_watch()
    second, _ = party.engine.open_watch()
    party.engine.arm_watch(first, 51, 0)
    party.engine.arm_watch(second, 52, 0)
    party.engine.close_watch(first)
    party.engine.watch_store(second, 1)
    party.take(52)
    assert not [one for one in party.seen if one.cookie == 51 and one.code == StatusCode.OK]
