"""The Engine protocol, data half: what moves, what is counted, what is refused. For the fake and the native engine.

INV-1 (logical counts), INV-3 (keys and generations). Each test runs on one thread and waits through the completion
fd.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from parties import BOTH, READ, WRITE, Party

from asyncfabric._bridge.engine import CompletionKind, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode

MakeParties = Callable[..., list[Party]]
Pair = tuple[Party, Party]
SIZES = [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, (1 << 20) - 1, (1 << 20) + 1]


def noise(length: int, seed: int = 7) -> bytes:
    """Return random bytes."""
    return random.Random(seed).randbytes(length)


def refused(call: Callable[[], object], kind: StatusKind) -> EngineStatusError:
    """Return the refusal of a call that must be refused at once with this kind."""
    with pytest.raises(EngineStatusError) as caught:
        call()
    assert caught.value.status_kind == kind, caught.value.args
    assert caught.value.args[3], "a refusal without a sentence"
    return caught.value


@pytest.mark.parametrize("rails", [1, 2, 3])
@pytest.mark.parametrize("length", SIZES)
def test_write_moves_exactly_its_bytes_and_counts_one(make_parties: MakeParties, length: int, rails: int) -> None:
    writer, reader = make_parties(2, rails=rails)
    source, target = writer.allocate(length + 64), reader.allocate(length + 64)
    data, poison = noise(length + 64), noise(length + 64, seed=8)
    writer.fill(source, data)
    reader.fill(target, poison)
    counter, imm = reader.engine.open_counter(-1)
    key = writer.key_of(reader, target)
    ended = writer.write(source, 3, length, key, 17, imm)
    assert (ended.kind, ended.code, ended.status_kind, ended.bytes) == (CompletionKind.OP, 0, 0, length)
    assert ended.duration_ns > 0 and 0 < ended.rails < 1 << rails
    assert reader.count_to(counter, 1) == 1
    assert reader.bytes_of(target) == poison[:17] + data[3 : 3 + length] + poison[17 + length :]
    assert reader.engine.counter_value(counter) == 1


def test_write_without_imm_counts_nothing(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(4096), reader.allocate(4096)
    key = writer.key_of(reader, target)
    counter, imm = reader.engine.open_counter(-1)
    assert writer.write(source, 0, 4096, key).code == 0
    assert writer.write(source, 0, 0, key).code == 0
    assert writer.write(source, 0, 1, key, imm=imm).code == 0
    assert reader.count_to(counter, 1) == 1


def test_registered_memory_moves_like_allocated_memory(pair: Pair) -> None:
    writer, reader = pair
    outgoing, incoming = bytearray(noise(10_001)), bytearray(10_001)
    source, target = writer.register(outgoing), reader.register(incoming)
    assert writer.write(source, 0, 10_001, writer.key_of(reader, target)).code == 0
    assert incoming == outgoing
    assert writer.release(source).code == 0 and reader.release(target).code == 0


def test_a_fabric_may_write_to_itself(make_parties: MakeParties) -> None:
    (alone,) = make_parties(1)
    source, target = alone.allocate(4096), alone.allocate(4096)
    alone.fill(source, data := noise(4096))
    counter, imm = alone.engine.open_counter(-1)
    assert alone.write(source, 0, 4096, alone.key_of(alone, target), imm=imm).code == 0
    assert alone.count_to(counter, 1) == 1
    assert alone.bytes_of(target) == data


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("pages", [0, 1, 5, 1024, 1025, 3000])
def test_pages_move_by_their_lists_and_count_their_number(make_parties: MakeParties, pages: int, rails: int) -> None:
    writer, reader = make_parties(2, rails=rails)
    page, source_stride, target_stride = 48, 64, 80
    source, target = writer.allocate(pages * 64 + 4096), reader.allocate(pages * 80 + 4096)
    writer.fill(source, data := noise(pages * 64 + 4096))
    counter, imm = reader.engine.open_counter(-1)
    order = random.Random(3)
    froms, tos = array("q", range(pages)), array("q", range(pages))
    order.shuffle(froms)
    order.shuffle(tos)
    cookie = writer.cookie()
    key = writer.key_of(reader, target)
    writer.engine.submit_write_pages(cookie, source, froms, key, tos, page, source_stride, target_stride, 5, 9, imm)
    froms_then, tos_then = list(froms), list(tos)
    for index in range(pages):
        froms[index] = tos[index] = 0  # the engine must have copied the lists
    ended = writer.take_ok(cookie)
    assert ended.bytes == pages * page
    expected = bytearray(len(reader.bytes_of(target)))
    for start, end in zip(froms_then, tos_then, strict=True):
        expected[end * 80 + 9 : end * 80 + 9 + page] = data[start * 64 + 5 : start * 64 + 5 + page]
    assert reader.count_to(counter, pages) == pages
    assert reader.bytes_of(target) == expected


def test_duplicate_pages_each_count(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(8192), reader.allocate(8192)
    writer.fill(source, data := noise(8192))
    counter, imm = reader.engine.open_counter(-1)
    cookie = writer.cookie()
    pages = (array("q", [1, 1, 1]), writer.key_of(reader, target), array("q", [0, 0, 1]))
    writer.engine.submit_write_pages(cookie, source, *pages, 4096, 4096, 4096, 0, 0, imm)
    writer.take_ok(cookie)
    assert reader.count_to(counter, 3) == 3
    assert reader.bytes_of(target) == data[4096:] * 2


def test_scatter_counts_once_at_each_target(make_parties: MakeParties) -> None:
    writer, first, second = make_parties(3)
    source = writer.allocate(4096)
    writer.fill(source, data := noise(4096))
    targets, counters = [], []
    for party in (first, second):
        region = party.allocate(4096)
        counters.append((party, region, party.engine.open_counter(77)[0]))
        targets.append((writer.key_of(party, region), 10 * len(targets), 3, 1001 - len(targets)))
    cookie = writer.cookie()
    writer.engine.submit_scatter(cookie, source, targets, 77)
    assert writer.take_ok(cookie).bytes == 2001
    for number, (party, region, counter) in enumerate(counters):
        assert party.count_to(counter, 1) == 1
        length = 1001 - number
        assert party.bytes_of(region)[3 : 3 + length] == data[10 * number : 10 * number + length]
        assert not any(party.bytes_of(region)[3 + length :])


def test_signals_count_without_data(make_parties: MakeParties) -> None:
    writer, first, second = make_parties(3)
    peers = [writer.connect(first), writer.connect(second), writer.connect(first)]
    assert peers[0] == peers[2] != peers[1]
    cookie = writer.cookie()
    writer.engine.submit_signal(cookie, peers, 5)
    assert writer.take_ok(cookie).bytes == 0
    counters = [party.engine.open_counter(5)[0] for party in (first, second)]
    assert first.count_to(counters[0], 2) == 2
    assert second.count_to(counters[1], 1) == 1


def test_empty_groups_are_complete_at_once(pair: Pair) -> None:
    writer, _ = pair
    source = writer.allocate(16)
    first, second = writer.cookie(), writer.cookie()
    writer.engine.submit_scatter(first, source, [], 5)
    writer.engine.submit_signal(second, [], 5)
    assert writer.take_ok(first).bytes == 0
    assert writer.take_ok(second).bytes == 0


def test_read_fetches_the_peers_bytes(pair: Pair) -> None:
    writer, reader = pair
    if not writer.engine.rails()[0]["can_read"]:
        pytest.skip("this rail cannot read")
    remote, local = reader.allocate(10_000), writer.allocate(10_000)
    reader.fill(remote, data := noise(10_000))
    cookie = writer.cookie()
    writer.engine.submit_read(cookie, local, 11, 5003, writer.key_of(reader, remote, READ), 100)
    assert writer.take_ok(cookie).bytes == 5003
    assert writer.bytes_of(local) == bytes(11) + data[100:5103] + bytes(10_000 - 5014)


MISUSES: dict[str, Callable[[Party, int, int], object]] = {
    "local end": lambda w, r, k: w.engine.submit_write(1, r, 4090, 7, k, 0, -1),
    "local offset": lambda w, r, k: w.engine.submit_write(1, r, 4097, 0, k, 0, -1),
    "local overflow": lambda w, r, k: w.engine.submit_write(1, r, 2**64 - 1, 2, k, 0, -1),
    "remote end": lambda w, r, k: w.engine.submit_write(1, r, 0, 10, k, 4087, -1),
    "remote overflow": lambda w, r, k: w.engine.submit_write(1, r, 0, 2, k, 2**64 - 1, -1),
    "imm below": lambda w, r, k: w.engine.submit_write(1, r, 0, 1, k, 0, -2),
    "imm above": lambda w, r, k: w.engine.submit_write(1, r, 0, 1, k, 0, 1 << 20),
    "read beyond": lambda w, r, k: w.engine.submit_read(1, r, 0, 4097, k, 0),
    "source page": lambda w, r, k: _pages(w, r, k, [0, 4], [0, 1]),
    "target page": lambda w, r, k: _pages(w, r, k, [0, 1], [0, 4]),
    "negative page": lambda w, r, k: _pages(w, r, k, [0, -1], [0, 1]),
    "page overflow": lambda w, r, k: _pages(w, r, k, [2**62], [0]),
    "page offset": lambda w, r, k: _pages(w, r, k, [3], [3], offset=1),
    "page imm": lambda w, r, k: _pages(w, r, k, [1], [1], imm=1 << 20),
    "scatter local": lambda w, r, k: w.engine.submit_scatter(1, r, [(k, 0, 0, 1), (k, 4096, 0, 1)], -1),
    "scatter remote": lambda w, r, k: w.engine.submit_scatter(1, r, [(k, 0, 0, 1), (k, 0, 4096, 1)], -1),
    "signal without imm": lambda w, r, k: w.engine.submit_signal(1, [], -1),
    "long message": lambda w, r, k: w.engine.submit_send(1, w.connect(w.others[1]), bytes(8193)),
    "counter imm": lambda w, r, k: w.engine.open_counter(1 << 20),
    "key beyond": lambda w, r, k: w.engine.region_key(r, WRITE, 1, 4096),
    "much too long": lambda w, r, k: w.engine.submit_allocate(1, 1 << 60, -1, BOTH),
    "page bytes": lambda w, r, k: _pages(w, r, k, [0], [0], page=0),
    "no length": lambda w, r, k: w.engine.submit_allocate(1, 0, -1, BOTH),
    "no memory": lambda w, r, k: w.engine.submit_register(1, 0, 4096, -1, BOTH),
    "strange access": lambda w, r, k: w.engine.submit_allocate(1, 16, -1, 8),
}


def _pages(
    party: Party,
    region: int,
    key: int,
    sources: list[int],
    targets: list[int],
    *,
    offset: int = 0,
    imm: int = -1,
    page: int = 1024,
) -> object:
    lists = (array("q", sources), key, array("q", targets))
    return party.engine.submit_write_pages(1, region, *lists, page, 1024, 1024, offset, 0, imm)


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_at_the_call_and_breaks_nothing(pair: Pair, misuse: str) -> None:
    writer, reader = pair
    source, target = writer.allocate(4096), reader.allocate(4096)
    key = writer.key_of(reader, target)
    refused(lambda: MISUSES[misuse](writer, source, key), StatusKind.VALUE)
    assert not any(reader.bytes_of(target))
    writer.fill(source, data := noise(4096))
    assert writer.write(source, 0, 4096, key).code == 0
    assert reader.bytes_of(target) == data


def test_page_lists_of_two_lengths_are_refused(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(4096), reader.allocate(4096)
    key = writer.key_of(reader, target)
    with pytest.raises((EngineStatusError, ValueError), match=r"1 source pages.* 2 target pages"):
        _pages(writer, source, key, [1], [1, 2])
    for lists in (
        (array("i", [0]), array("q", [0])),
        ([0], [0]),
        (array("q", [0, 1]), memoryview(array("q", range(4)))[::2]),
    ):
        with pytest.raises((EngineStatusError, ValueError, TypeError, BufferError)):
            writer.engine.submit_write_pages(1, source, lists[0], key, lists[1], 8, 8, 8, 0, 0, -1)
    assert not any(reader.bytes_of(target))


def test_a_key_carries_no_right_that_was_not_asked_for(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(64), reader.allocate(64)
    readable, writable = writer.key_of(reader, target, READ), writer.key_of(reader, target, WRITE)
    refused(lambda: writer.engine.submit_write(1, source, 0, 1, readable, 0, -1), StatusKind.TRANSFER)
    refused(lambda: writer.engine.submit_read(1, source, 0, 1, writable, 0), StatusKind.TRANSFER)
    lists = (array("q", [0]), readable, array("q", [0]))
    refused(lambda: writer.engine.submit_write_pages(1, source, *lists, 8, 8, 8, 0, 0, -1), StatusKind.TRANSFER)
    refused(lambda: writer.engine.submit_scatter(1, source, [(readable, 0, 0, 1)], -1), StatusKind.TRANSFER)
    weak = reader.allocate(16, WRITE)
    error = refused(lambda: reader.engine.region_key(weak, BOTH, 0, 16), StatusKind.TRANSFER)
    assert error.code == StatusCode.ACCESS_DENIED


def test_handles_of_closed_things_are_refused(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(64), reader.allocate(64)
    key = writer.key_of(reader, target)
    writer.engine.close_key(key)
    writer.engine.close_key(key)
    refused(lambda: writer.engine.submit_write(1, source, 0, 1, key, 0, -1), StatusKind.STALE)
    assert writer.engine.peer_of_key(key) == 0
    key = writer.key_of(reader, target)
    assert writer.release(source).code == 0
    for call in (
        lambda: writer.engine.submit_write(1, source, 0, 1, key, 0, -1),
        lambda: writer.engine.region_info(source),
        lambda: writer.engine.region_key(source, WRITE, 0, 1),
        lambda: writer.engine.submit_release(1, source),
        lambda: writer.engine.submit_revoke(1, source),
        lambda: writer.engine.submit_write(1, 2**40 + 7, 0, 1, key, 0, -1),
    ):
        refused(call, StatusKind.CLOSED)


def test_a_key_of_a_part_reaches_that_part_only(pair: Pair) -> None:
    writer, reader = pair
    source, target = writer.allocate(4096), reader.allocate(4096)
    writer.fill(source, data := noise(4096))
    opened, info = writer.engine.open_key(reader.engine.region_key(target, WRITE, 1000, 500))
    assert (info.incarnation, info.length, info.access) == (reader.engine.incarnation(), 500, WRITE)
    assert writer.write(source, 0, 500, opened).code == 0
    assert reader.bytes_of(target) == bytes(1000) + data[:500] + bytes(4096 - 1500)
    refused(lambda: writer.engine.submit_write(1, source, 0, 501, opened, 0, -1), StatusKind.VALUE)
    refused(lambda: writer.engine.submit_write(1, source, 0, 1, opened, 500, -1), StatusKind.VALUE)


def test_revoking_kills_every_key_handed_out_and_no_other(pair: Pair) -> None:
    writer, reader = pair
    source, target, other = writer.allocate(64), reader.allocate(64), reader.allocate(64)
    writer.fill(source, b"x" * 64)
    old, aside = writer.key_of(reader, target), writer.key_of(reader, other)
    assert writer.write(source, 0, 8, old).code == 0
    generation = reader.engine.region_info(target).generation
    cookie = reader.cookie()
    reader.engine.submit_revoke(cookie, target)
    reader.take_ok(cookie)
    assert reader.engine.region_info(target).generation == generation + 1
    counter, imm = reader.engine.open_counter(-1)
    ended = writer.write(source, 0, 64, old, imm=imm)
    assert ended.code in (StatusCode.STALE_KEY, StatusCode.ACCESS_DENIED, StatusCode.TRANSPORT)
    assert reader.bytes_of(target) == b"x" * 8 + bytes(56)
    assert writer.write(source, 0, 64, aside).code == 0
    assert writer.write(source, 0, 64, writer.key_of(reader, target), imm=imm).code == 0
    assert reader.count_to(counter, 1) == 1
    assert reader.bytes_of(target) == b"x" * 64


def test_keys_of_a_released_region_touch_nothing(pair: Pair) -> None:
    writer, reader = pair
    source, kept = writer.allocate(64), bytearray(64)
    target = reader.register(kept)
    key = writer.key_of(reader, target)
    writer.fill(source, b"x" * 64)
    assert writer.write(source, 0, 8, key).code == 0
    assert reader.release(target).code == 0
    assert writer.write(source, 0, 64, key).code != 0
    assert kept == b"x" * 8 + bytes(56)
