"""The Engine protocol, everything around the data: connecting, messages, cancelling, bounds of queues, closing, the fd.

INV-2 stands here as far as it can be seen without faults: what was cancelled before it was posted never leaves.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from parties import Party, settles

from asyncfabric._bridge.engine import CompletionKind, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode
from asyncfabric.config import FabricConfig

Pair = tuple[Party, Party]
MakeParties = Callable[..., list[Party]]
MANUAL = FabricConfig(polling="manual", max_ops=2)


def refused(call: Callable[[], object], kind: StatusKind) -> None:
    """Check that a call is refused at once with this kind."""
    with pytest.raises(EngineStatusError) as caught:
        call()
    assert caught.value.status_kind == kind, caught.value.args


def test_addresses_state_who_and_which_run(make_parties: MakeParties) -> None:
    parties = make_parties(3)
    assert len({party.engine.incarnation() for party in parties}) == 3
    for party in parties:
        assert parties[0].engine.check_address(party.engine.address()) == party.engine.incarnation() > 0


def test_rails_and_peers_are_listed(make_parties: MakeParties) -> None:
    writer, reader = make_parties(2, rails=2)
    rails = writer.engine.rails()
    assert len(rails) == 2
    assert set(rails[0]) == {
        "provider",
        "device",
        "library",
        "version",
        "gbits_per_s",
        "ordered",
        "can_read",
        "can_gather",
        "up",
        "reason",
        "admission",
    }
    assert all("local" in rail["provider"] and rail["up"] for rail in rails)
    peer = writer.connect(reader)
    (listed,) = writer.engine.peers()
    assert (listed["id"], listed["incarnation"], listed["state"]) == (peer, reader.engine.incarnation(), 1)
    assert set(listed) == {"id", "incarnation", "state", "lanes", "provider", "bytes_sent", "ops_in_flight"}
    assert writer.engine.statistics()["peers"] == 1


def test_statistics_have_the_names_of_the_native_struct(pair: Pair) -> None:
    header = Path(__file__, "../../../native/include/asyncfabric/types.h").resolve().read_text()
    struct = header.partition("struct EngineStatistics {")[2].partition("};")[0]
    assert list(pair[0].engine.statistics()) == re.findall(r"uint64_t (\w+) = 0;", struct)


def test_work_shows_in_the_statistics(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(4096), reader.allocate(8192)
    _, imm = reader.engine.open_counter(-1)
    assert writer.write(source, 0, 4096, writer.key_of(reader, target), imm=imm).code == 0
    assert settles(writer, "ops_completed", 1) and settles(writer, "bytes_written", 4096)
    ours, theirs = writer.engine.statistics(), reader.engine.statistics()
    assert ours["ops_submitted"] == 1
    assert (ours["regions"], ours["registered_bytes"]) == (1, 4096)
    assert (theirs["regions"], theirs["registered_bytes"]) == (1, 8192)


def test_a_key_names_its_peer_once_connected(pair: Pair) -> None:
    writer, reader = pair
    target = reader.allocate(64)
    key = writer.key_of(reader, target)
    assert writer.engine.peer_of_key(key) == 0
    peer = writer.connect(reader)
    assert writer.engine.peer_of_key(key) == peer


def test_messages_arrive_in_both_directions(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    payloads = [b"", b"one", bytes(8192)]
    for payload in payloads:
        cookie = writer.cookie()
        writer.engine.submit_send(cookie, peer, payload)
        assert writer.take_ok(cookie).bytes == len(payload)
    got: list[bytes] = []
    back = 0
    while len(got) < 3:
        messages = reader.engine.take_messages(1)
        if not messages:
            reader.take_kind(CompletionKind.MESSAGE)
        for sender, payload in messages:
            back = sender
            got.append(payload)
    assert sorted(got) == sorted(payloads)
    cookie = reader.cookie()
    reader.engine.submit_send(cookie, back, b"answer")
    reader.take_ok(cookie)
    assert writer.engine.spin_messages(9, time.monotonic_ns() + 5_000_000_000) == [(peer, b"answer")]
    assert writer.engine.take_messages(9) == []
    assert settles(reader, "messages_received", 3)


def test_every_message_after_an_empty_mailbox_is_announced(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    for cookie in (1, 2, 3):
        writer.engine.submit_send(cookie, peer, b"hello")
        reader.take_kind(CompletionKind.MESSAGE)
        assert len(reader.engine.take_messages(1)) == 1
        assert reader.engine.take_messages(1) == []
        writer.take_ok(cookie)


def test_a_sender_has_64_messages_untaken_and_loses_none(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    for number in range(150):
        writer.engine.submit_send(100 + number, peer, b"%d" % number)
    assert settles(reader, "messages_received", 64)
    got: list[bytes] = []
    while len(got) < 150:
        messages = reader.engine.take_messages(7)
        if not messages:
            reader.take_kind(CompletionKind.MESSAGE)
        got += [payload for _, payload in messages]
    assert sorted(got, key=int) == [b"%d" % number for number in range(150)]
    for number in range(150):
        writer.take_ok(100 + number)


def test_nothing_leaves_before_a_manual_step(make_parties: MakeParties) -> None:
    writer, reader = make_parties(2, config=MANUAL)
    source, target = writer.allocate(64), reader.allocate(64)
    writer.fill(source, b"x" * 64)
    key = writer.key_of(reader, target)
    op = writer.engine.submit_write(71, source, 0, 64, key, 0, -1)
    progress = writer.engine.progress(op)
    assert (progress.known, progress.bytes_total, progress.bytes_posted) == (True, 64, 0)
    assert not writer.gather() and not any(reader.bytes_of(target))
    writer.take_ok(71)
    assert not writer.engine.progress(op).known
    assert reader.bytes_of(target) == b"x" * 64


def test_cancelled_before_the_first_post_means_that_nothing_left(make_parties: MakeParties) -> None:
    writer, reader = make_parties(2, config=MANUAL)
    source, target = writer.allocate(64), reader.allocate(64)
    writer.fill(source, b"x" * 64)
    counter, imm = reader.engine.open_counter(-1)
    key = writer.key_of(reader, target)
    op = writer.engine.submit_write(71, source, 0, 64, key, 0, imm)
    writer.engine.cancel(op)
    ended = writer.take(71)
    assert (ended.code, ended.bytes, ended.rails) == (StatusCode.CANCELLED, 0, 0)
    writer.engine.cancel(op)
    assert writer.write(source, 0, 1, key, imm=imm).code == 0
    assert reader.count_to(counter, 1) == 1
    assert reader.bytes_of(target) == b"x" + bytes(63)
    assert settles(writer, "ops_cancelled", 1)


def test_a_full_queue_is_busy_and_states_when_it_is_writable(make_parties: MakeParties) -> None:
    writer, reader = make_parties(2, config=MANUAL)
    source, target = writer.allocate(64), reader.allocate(64)
    key = writer.key_of(reader, target)
    writer.engine.arm_writable(80)
    writer.take_kind(CompletionKind.WRITABLE)
    for cookie in (71, 72):
        writer.engine.submit_write(cookie, source, 0, 64, key, 0, -1)
    refused(lambda: writer.engine.submit_write(73, source, 0, 64, key, 0, -1), StatusKind.BUSY)
    writer.engine.arm_writable(81)
    assert not [one for one in writer.gather() if one.kind == CompletionKind.WRITABLE]
    assert writer.take(81).kind == CompletionKind.WRITABLE
    writer.take_ok(71)
    writer.take_ok(72)
    assert writer.write(source, 0, 64, key).code == 0


def test_completions_that_nobody_takes_count_too(make_parties: MakeParties) -> None:
    (party,) = make_parties(1, config=FabricConfig(max_ops=2))
    source = party.allocate(16)
    party.gather()
    accepted = 0
    for cookie in range(201, 211):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            # Looked at before the call: an op that ends between the refusal and a later look would hide the reason.
            all_ended = party.engine.statistics()["ops_completed"] == accepted
            try:
                party.engine.submit_scatter(cookie, source, [], -1)
            except EngineStatusError as error:
                assert error.status_kind == StatusKind.BUSY
                if all_ended:
                    break
            else:
                accepted += 1
                break
    assert accepted == 4
    party.engine.arm_writable(81)
    for cookie in range(201, 205):
        party.take_ok(cookie)
    assert party.take(81).kind == CompletionKind.WRITABLE


def test_the_fd_rings_only_for_a_sleeper(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(64), reader.allocate(64)
    key = writer.key_of(reader, target)
    fd = writer.engine.completion_fd()
    assert writer.write(source, 0, 64, key).code == 0
    assert writer.engine.arm()
    writer.engine.submit_write(71, source, 0, 64, key, 0, -1)
    assert select.select([fd], [], [], 20)[0], "armed, but not woken"
    writer.engine.disarm()
    assert not select.select([fd], [], [], 0)[0], "disarm() left the fd readable"
    assert not writer.engine.arm(), "armed although a completion waits"
    writer.take_ok(71)
    assert writer.engine.arm()
    writer.engine.disarm()


def test_a_burst_rings_once_and_nobody_rings_for_the_awake(pair: Pair) -> None:
    writer, _ = pair
    source, fd = writer.allocate(16), writer.engine.completion_fd()
    while not writer.engine.arm():
        writer.gather()
    rings = writer.engine.statistics()["loop_wakes"]
    for cookie in range(201, 211):
        writer.engine.submit_scatter(cookie, source, [], -1)
    assert select.select([fd], [], [], 20)[0]
    for cookie in range(201, 211):
        _poll_for(writer, cookie)
    assert writer.engine.statistics()["loop_wakes"] == rings + 1
    writer.engine.disarm()
    writer.engine.submit_scatter(211, source, [], -1)
    _poll_for(writer, 211)
    assert not select.select([fd], [], [], 0)[0]
    assert writer.engine.statistics()["loop_wakes"] == rings + 1


def _poll_for(party: Party, cookie: int) -> None:
    deadline = time.monotonic() + 20
    while not [one for one in party.seen if one.cookie == cookie]:
        party.gather()
        assert time.monotonic() < deadline


def test_poll_takes_no_more_than_it_is_asked_for(pair: Pair) -> None:
    writer, _ = pair
    source = writer.allocate(16)
    for cookie in range(201, 206):
        writer.engine.submit_scatter(cookie, source, [], -1)
    got: list[int] = []
    while len(got) < 5:
        batch = writer.engine.poll(2)
        assert len(batch) <= 2
        got += [one.cookie for one in batch]
    assert sorted(got) == list(range(201, 206))


def test_closing_drains_and_refuses_what_comes_later(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(1 << 20), reader.allocate(1 << 20)
    writer.fill(source, b"y" * (1 << 20))
    key = writer.key_of(reader, target)
    writer.engine.submit_write(71, source, 0, 1 << 20, key, 0, -1)
    writer.engine.submit_close(99, False)
    assert writer.take(99).kind == CompletionKind.CLOSED
    writer.take_ok(71)
    assert reader.bytes_of(target) == b"y" * (1 << 20)
    for call in (
        lambda: writer.engine.submit_write(72, source, 0, 1, key, 0, -1),
        lambda: writer.engine.submit_allocate(72, 16, -1, 3),
        lambda: writer.engine.submit_connect(72, reader.engine.address()),
        lambda: writer.engine.submit_close(72, False),
    ):
        refused(call, StatusKind.CLOSED)
    writer.engine.close()
    writer.engine.close()
    for call in (writer.engine.arm, writer.engine.completion_fd, lambda: writer.engine.poll(1)):
        refused(call, StatusKind.CLOSED)


def test_a_peer_that_closed_is_reported_and_ops_to_it_fail(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(64), reader.allocate(64)
    key, peer = writer.key_of(reader, target), writer.connect(reader)
    assert writer.write(source, 0, 64, key).code == 0
    reader.engine.submit_close(99, False)
    reader.take(99)
    reader.engine.close()
    lost = writer.take_kind(CompletionKind.PEER_LOST)
    assert (lost.cookie, lost.value) == (0, peer)
    assert writer.write(source, 0, 64, key).status_kind in (StatusKind.PEER, StatusKind.STALE)
    cookie = writer.cookie()
    writer.engine.submit_signal(cookie, [peer], 1)
    ended = writer.take(cookie)
    assert (ended.status_kind, ended.peer) == (StatusKind.PEER, peer)


def test_an_address_where_nobody_lives_is_unreachable(make_parties: MakeParties) -> None:
    writer, reader = make_parties(2, config=FabricConfig(connect_deadline=0.2))
    address = reader.engine.address()
    reader.engine.close()
    cookie = writer.cookie()
    writer.engine.submit_connect(cookie, address)
    ended = writer.take(cookie)
    assert ended.kind == CompletionKind.CONTROL
    assert ended.status_kind == StatusKind.PEER
    assert writer.engine.last_error()


def test_the_next_use_of_a_disconnected_peer_connects_again(pair: Pair) -> None:
    writer, reader = pair
    peer = writer.connect(reader)
    cookie = writer.cookie()
    writer.engine.submit_disconnect(cookie, peer)
    writer.take_ok(cookie)
    cookie = writer.cookie()
    writer.engine.submit_signal(cookie, [peer], 1)
    assert writer.take(cookie).code == StatusCode.OK


def test_memory_views_outlive_their_region(make_parties: MakeParties) -> None:
    (party,) = make_parties(1)
    region = party.allocate(4096)
    view = party.engine.region_memory(region)
    view[:5] = b"hello"
    assert party.release(region).code == 0
    party.engine.close()
    assert bytes(view[:5]) == b"hello"
    view[4095] = 1
