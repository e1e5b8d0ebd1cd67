"""Descriptors of the NIXL face: every form gives the same blocks, lookups find their registration, plans cover all."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from asyncfabric.integrations.nixl import _bindings as bind
from asyncfabric.integrations.nixl.blocks import Blocks, from_rows, from_strided
from asyncfabric.integrations.nixl.descriptors import registration_list, transfer_blocks, transfer_list
from asyncfabric.integrations.nixl.kinds import DRAM, VRAM
from asyncfabric.integrations.nixl.metadata import pack, unpack
from asyncfabric.integrations.nixl.notes import NoteQueue, Part, messages_of, read_message
from asyncfabric.integrations.nixl.plan import MOST_LENGTHS, _powers_of_two
from asyncfabric.integrations.nixl.ranges import NotCoveredError, Place, RangeTable


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.int32])
def test_tuples_and_arrays_are_the_same_list(dtype: Any) -> None:
    rows = [(4096, 10, 0), (8192, 20, 1)]
    by_tuples = transfer_list(rows, "DRAM")
    by_array = transfer_list(np.array(rows, dtype=dtype), "DRAM")
    assert by_tuples == by_array and list(by_array) == rows
    assert by_array.getType() == bind.DRAM_SEG and by_array.descCount() == 2 and not by_array.isEmpty()
    assert pickle.loads(pickle.dumps(by_array)) == by_tuples == pickle.loads(pickle.dumps(by_tuples))
    assert by_array.index((8192, 20, 1)) == 1


def test_long_lists_are_read_at_once_and_refused_row_by_row() -> None:
    rows = [(4096 * number, 10, 0) for number in range(200)]
    made = transfer_list(rows, "DRAM")
    assert made._rows is None and list(made) == rows
    made.append((1, 2, 0))
    assert len(made) == 201 and made[200] == (1, 2, 0) and made.blocks.lengths[-1] == 2
    with pytest.raises(TypeError, match="tuples of 3"):
        transfer_list([*rows, (1, 2)], "DRAM")
    with pytest.raises(TypeError, match="integers"):
        transfer_list([*rows, (1, 2, 0.5)], "DRAM")
    with pytest.raises(ValueError, match="negative"):
        transfer_list([*rows, (1, 2, -1)], "DRAM")


def test_tensors_are_lists() -> None:
    tensors = [torch.zeros(5, dtype=torch.int32), torch.zeros(3, dtype=torch.uint8)]
    assert list(transfer_list(tensors, None)) == [(one.data_ptr(), one.nbytes, 0) for one in tensors]
    assert list(registration_list(tensors[0], None)) == [(tensors[0].data_ptr(), 20, 0, b"")]
    with pytest.raises(TypeError, match=r"tensor 0 .* is not contiguous"):
        transfer_list([torch.zeros(4, 4).T], None)


def test_lists_grow_and_shrink() -> None:
    made = bind.nixlRegDList(bind.DRAM_SEG, 3)
    assert made.isEmpty()
    made.append((1, 2, 0, "text"))
    made.addDesc((3, 4, 0, b"bytes"))
    assert list(made) == [(1, 2, 0, b"text"), (3, 4, 0, b"bytes")]
    assert made.blocks.addresses.tolist() == [1, 3]
    made.remDesc(0)
    assert made.blocks.lengths.tolist() == [4] and list(made.trim()) == [(3, 4, 0)]
    made.clear()
    assert len(made) == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: transfer_list([(1, 2, 0)], None), TypeError, "mem_type"),
        (lambda: transfer_list([(1, 2)], "DRAM"), TypeError, "tuples of 3"),
        (lambda: transfer_list([(1, 2, "x")], "DRAM"), TypeError, "integers"),
        (lambda: transfer_list(np.zeros((2, 5), np.uint64), "DRAM"), TypeError, "Nx5"),
        (lambda: transfer_list(np.zeros((2, 4), np.uint64), "DRAM"), TypeError, "shape"),
        (lambda: transfer_list(np.zeros((2, 3)), "DRAM"), ValueError, "integers"),
        (lambda: transfer_list([(-1, 2, 0)], "DRAM"), ValueError, "0..2"),
        (lambda: transfer_list([], "DRAM"), IndexError, "nothing"),
        (lambda: transfer_list([(1, 2, 0)], "RAM"), KeyError, "RAM"),
        (lambda: transfer_list(bind.nixlRegDList(bind.DRAM_SEG), None), TypeError, "registration list"),
        (lambda: registration_list(bind.nixlXferDList(bind.DRAM_SEG), None), TypeError, "transfer list"),
        (lambda: registration_list([(1, 2, 0)], "DRAM"), TypeError, "tuples of 4"),
        (lambda: transfer_blocks(np.zeros((2, 5), np.uint64), None), ValueError, "mem_type"),
        (lambda: transfer_list(7, "DRAM"), TypeError, "int"),
        (lambda: transfer_list(np.zeros((0, 3), np.uint64), "DRAM"), IndexError, "nothing"),
        (lambda: transfer_blocks(np.array([[0, 8, 0, 8, 0]]), "DRAM"), bind.nixlNotFoundError, "needs a block"),
        (lambda: transfer_blocks(np.array([[0, 8, 0, 7, 2]]), "DRAM"), bind.nixlNotFoundError, "stride"),
    ],
)
def test_misuse_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_strided_rows_are_their_blocks_in_order() -> None:
    rows = np.array([[1000, 16, 2, 64, 3], [5000, 8, 1, 8, 2], [9000, 4, 0, 0, 1]], dtype=np.uint64)
    blocks = from_strided(VRAM, rows)
    assert blocks.rows.tolist() == [
        [1000, 16, 2],
        [1064, 16, 2],
        [1128, 16, 2],
        [5000, 8, 1],
        [5008, 8, 1],
        [9000, 4, 0],
    ]


def test_lookups_find_what_covers_each_block() -> None:
    random = np.random.default_rng(3)
    places = [
        Place(VRAM if memory else DRAM, int(device), int(start), int(length))
        for memory, device, start, length in zip(
            random.integers(0, 2, 60),
            random.integers(0, 3, 60),
            random.integers(0, 3000, 60),
            random.integers(1, 400, 60),
            strict=True,
        )
    ]
    table = RangeTable((place, place) for place in places)
    for memory in (DRAM, VRAM):
        rows = np.stack(
            (random.integers(0, 3400, 400), random.integers(1, 90, 400), random.integers(0, 3, 400)), axis=1
        )
        for row in rows:
            start, length, device = (int(number) for number in row)
            fits = [
                one
                for one in places
                if one.memory == memory
                and one.device == device
                and one.start <= start
                and start + length <= one.start + one.length
            ]
            try:
                found = table.find(from_rows(memory, row[None]))
            except NotCoveredError:
                assert not fits
                continue
            assert found.owners[int(found.which[0])] in fits
            assert found.offsets[0] == start - found.owners[0].start
        covered = np.array([row for row in rows if _covered(table, from_rows(memory, row[None]))])
        together = table.find(from_rows(memory, covered))
        for row, which, offset in zip(covered, together.which, together.offsets, strict=True):
            owner = together.owners[int(which)]
            assert owner.start + offset == row[0] and offset + row[1] <= owner.length


def _covered(table: RangeTable[Place], blocks: Blocks) -> bool:
    try:
        table.find(blocks)
    except NotCoveredError:
        return False
    return True


def test_a_missing_block_is_named_by_its_position() -> None:
    table = RangeTable([(Place(VRAM, 1, 100, 50), "a"), (Place(VRAM, 2, 100, 50), "b")])
    with pytest.raises(NotCoveredError, match="VRAM_SEG of device 2") as caught:
        table.find(from_rows(VRAM, [[100, 50, 1], [120, 10, 2], [120, 31, 2]]))
    assert caught.value.position == 2


def test_powers_of_two_cover_each_block_once() -> None:
    lengths = np.array([1, 2, 3, 1000, 4096, 65535], dtype=np.int64)
    starts = np.cumsum(lengths + 7) - lengths
    pairs, sources, targets, sizes = _powers_of_two(np.arange(6), starts, starts + 5, lengths)
    cells = np.zeros(int(starts[-1] + lengths[-1]), dtype=np.int64)
    for pair, source, target, size in zip(pairs, sources, targets, sizes, strict=True):
        cells[source : source + size] += 1 + pair
        assert target == source + 5 and size & (size - 1) == 0
    for pair, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert (cells[start : start + length] == 1 + pair).all()
    assert cells.sum() == ((1 + np.arange(6)) * lengths).sum() and MOST_LENGTHS >= 1


def first_part(name: bytes, number: int, note: bytes) -> Part:
    part = read_message(messages_of(name, number, note)[0])
    assert part is not None
    return part


def handed_over(queue: NoteQueue, *parts: tuple[int, Part]) -> dict[str, list[bytes]]:
    taken: dict[str, list[bytes]] = {}
    queue.hand_over(list(parts), taken)
    return taken


def test_notes_that_are_handed_over_follow_those_that_were_kept_in_the_order_of_their_numbers() -> None:
    queue = NoteQueue()
    queue.take_in([(1, first_part(b"a", 5, b"kept"))])
    later = [(1, first_part(b"a", 8, b"third")), (1, first_part(b"a", 7, b"second")), (2, first_part(b"b", 1, b"b"))]
    assert handed_over(queue, *later) == {"a": [b"kept", b"second", b"third"], "b": [b"b"]}
    assert handed_over(queue) == {} and not queue.dropped


def test_the_oldest_notes_are_dropped_beyond_the_bounds() -> None:
    queue = NoteQueue(most_notes=3, most_bytes=100)
    for number in range(5):
        queue.take_in([(1, first_part(b"a", number, b"%d" % number))])
    assert queue.dropped == 2 and handed_over(queue) == {"a": [b"2", b"3", b"4"]}
    queue.take_in([(1, first_part(b"a", 9, bytes(60))), (1, first_part(b"b", 10, bytes(60)))])
    assert handed_over(queue) == {"b": [bytes(60)]}
    assert read_message(b"no note") is None and read_message(b"AN\x03" + bytes(60)) is None


def test_long_notes_travel_in_parts_and_parts_that_never_come_are_bounded() -> None:
    queue = NoteQueue()
    long = np.random.default_rng(1).bytes(40_000)
    messages = list(messages_of(b"name", 7, long))
    assert len(messages) == 5 and all(len(message) <= 8192 for message in messages)
    parts = [part for part in map(read_message, messages) if part is not None]
    queue.take_in([(1, part) for part in parts[3:]])
    queue.take_in([(2, part) for part in parts[:3]])  # of another sender: not joined
    assert not handed_over(queue)
    queue.take_in([(1, part) for part in parts[:3]])
    assert handed_over(queue) == {"name": [long]}
    for number in range(2000):
        queue.take_in([(3, first_part(b"name", 100 + number, long))])
    assert len(queue._unfinished) <= 256
    small = NoteQueue(most_bytes=20_000)
    for number in range(50):
        small.take_in([(3, first_part(b"name", number, long))])
    assert small._unfinished._bytes <= 20_000 and len(small._unfinished) == 2


@pytest.mark.parametrize("cut", [0, 3, 20, 40, -1])
def test_damaged_metadata_is_a_mismatch(cut: int) -> None:
    import asyncfabric as af

    whole = pack("name", af.FabricAddress(1, b"engine bytes"), 3, True, [])
    assert unpack(whole).name == "name"
    with pytest.raises(bind.nixlMismatchError, match="metadata"):
        unpack(whole[:cut])
    with pytest.raises(bind.nixlMismatchError):
        unpack(whole + b"x")
