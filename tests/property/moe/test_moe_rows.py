"""The compiled row loops against dense tensors, bit for bit; and memory that is handed out while nobody holds it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

from asyncfabric.moe.host.loops import KINDS, as_bytes, row_loops, rows_of
from asyncfabric.moe.host.shelf import LEAST_BYTES, MOST_BYTES, Shelf

WIDTHS = (16, 48, 64, 144)
dtypes = st.sampled_from(list(KINDS))


def values(random: np.random.Generator, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of very different sizes: some below the normal range, some that leave it when they are added."""
    sizes = np.ldexp(random.standard_normal((rows, width)), random.integers(-30, 16, size=(rows, width)))
    return torch.from_numpy(sizes.astype(np.float32)).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def offsets_of(counts: Any) -> Any:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def spans_of(random: np.random.Generator, rows: int) -> list[tuple[int, int]]:
    """Cut rows into spans, some of them empty."""
    return list(pairwise([0, *sorted(random.integers(0, rows + 1, size=random.integers(0, 4)).tolist()), rows]))


@settings(max_examples=60)
@given(dtypes, st.sampled_from(WIDTHS), st.lists(st.integers(0, 5), max_size=12), st.integers(0, 1 << 20))
def test_weighted_sums_have_the_bits_of_dense_tensors(
    dtype: torch.dtype, width: int, pairs: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    offsets = offsets_of(pairs)
    total = int(offsets[-1])
    outputs = values(random, total + 3, width, dtype)
    position = random.permutation(total + 3)[:total].astype(np.int64)
    weights = random.standard_normal(total).astype(np.float32)
    found = torch.empty((len(pairs), width), dtype=dtype)
    parts = spans_of(random, len(pairs))
    places = [as_bytes(found)[begin:] for begin, _ in parts]
    row_loops().weigh_rows(as_bytes(outputs), KINDS[dtype], offsets, position, weights, parts, places)
    wanted = torch.zeros((len(pairs), width))
    for row in range(len(pairs)):
        for pair in range(offsets[row], offsets[row + 1]):
            wanted[row] += outputs[position[pair]].float() * float(weights[pair])
    assert same_bits(found, wanted.to(dtype))


@settings(max_examples=60)
@given(dtypes, st.sampled_from(WIDTHS), st.integers(0, 9), st.integers(1, 6), st.integers(0, 1 << 20))
def test_rows_of_all_members_are_added_in_order_also_in_passes(
    dtype: torch.dtype, width: int, tokens: int, members: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    goes = random.random((members, tokens)) < 0.6
    listed = [np.flatnonzero(each) for each in goes]
    offsets = offsets_of([len(each) for each in listed])
    flat = np.concatenate(listed).astype(np.int64)
    rows = values(random, len(flat) + 4, width, dtype)
    at = random.integers(0, 5) + np.cumsum([0, *(len(each) for each in listed[:-1])])
    at = np.minimum(at, 4 + offsets[:-1])
    parts = np.stack([offsets[:-1], offsets[1:], at], axis=1)
    wanted = torch.zeros((tokens, width))
    for begin, end, place in parts.tolist():
        for number in range(begin, end):
            wanted[flat[number]] += rows[place + number - begin].float()
    found = torch.empty((tokens, width), dtype=dtype)
    row_loops().add_rows(as_bytes(rows), KINDS[dtype], flat, parts, as_bytes(found))
    assert same_bits(found, wanted.to(dtype))
    sums = torch.zeros((tokens, width))
    cut = parts.copy()
    cut[:, 1] = random.integers(cut[:, 0], cut[:, 1] + 1)
    left = np.stack([cut[:, 1], parts[:, 1], at + cut[:, 1] - cut[:, 0]], axis=1)
    for member in range(members):  # as passes bring them: one member after the other, some in two pieces
        for piece in (cut, left):
            row_loops().gather_sums(as_bytes(rows), KINDS[dtype], flat, piece[member : member + 1], sums.numpy())
    assert same_bits(sums, wanted)


@settings(max_examples=60)
@given(st.sampled_from([16, 64, 100]), st.lists(st.integers(0, 4), max_size=12), st.integers(0, 1 << 20))
def test_rows_are_taken_and_spread_to_where_they_belong(width: int, pairs: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    offsets = offsets_of(pairs)
    source = random.integers(0, 256, size=(len(pairs), width), dtype=np.uint8)
    position = random.permutation(int(offsets[-1]) + 2)[:-2].astype(np.int64)
    target = np.full((len(position) + 2, width), 0xA5, dtype=np.uint8)
    parts = spans_of(random, len(pairs))
    order = random.permutation(len(pairs)).astype(np.int64)
    mixed = np.empty_like(source)
    mixed[order] = source
    picks = random.random(len(parts)) < 0.5
    sources = [mixed if picked else source[begin:] for (begin, _), picked in zip(parts, picks, strict=True)]
    picked = [order[begin:] if picks[number] else None for number, (begin, _) in enumerate(parts)]
    row_loops().spread_rows(parts, sources, picked, offsets, position, target)
    wanted = np.full_like(target, 0xA5)
    wanted[position] = source[np.repeat(np.arange(len(pairs)), pairs)]
    assert np.array_equal(target, wanted)
    index = random.integers(0, len(target), size=7).astype(np.int64)
    taken = np.empty((7, width), dtype=np.uint8)
    parts = spans_of(random, 7)
    row_loops().take_rows(target, index, parts, [taken[begin:] for begin, _ in parts])
    assert np.array_equal(taken, target[index])


def test_large_targets_are_written_past_the_caches_and_whole() -> None:
    random = np.random.default_rng(1)
    source = random.integers(0, 256, size=(1024, 4096), dtype=np.uint8)
    position = random.permutation(4096).astype(np.int64)
    target = Shelf(1).rows(4096, 4096)  # 16 MiB, aligned
    row_loops().spread_rows([(0, 1024)], [source], [None], np.arange(0, 4097, 4), position, target)
    assert np.array_equal(target[position], np.repeat(source, 4, axis=0))


def test_rows_where_they_lie_are_taken_as_those_of_arrays_and_keep_their_owner() -> None:
    tensor = torch.arange(6 * 32, dtype=torch.int16).reshape(6, 32)
    wanted, still = as_bytes(tensor.clone()), ref(tensor)
    lying = rows_of(tensor)
    del tensor
    assert len(lying) == 6 and still() is not None
    index = np.array([5, 0, 3], dtype=np.int64)
    taken = torch.zeros((3, 32), dtype=torch.int16)
    row_loops().take_rows(lying, index, [(0, 2), (2, 3)], [rows_of(taken), as_bytes(taken)[2:]])
    assert np.array_equal(as_bytes(taken), wanted[index])
    del lying
    assert still() is None


def test_arrays_of_other_elements_are_refused() -> None:
    rows, index = np.zeros((2, 16), dtype=np.uint8), np.zeros(2, dtype=np.int64)
    for source, listed in ((rows.view(np.int16), index), (rows.reshape(-1), index), (rows, index.astype(np.int32))):
        with pytest.raises(ValueError, match=r"elements of \d bytes in \d dimensions are wanted"):
            row_loops().take_rows(source, listed, [(0, 2)], [rows.copy()])
    with pytest.raises(ValueError, match="not C-contiguous"):
        row_loops().take_rows(np.zeros((2, 32), dtype=np.uint8)[:, :16], index, [(0, 2)], [rows.copy()])


def test_what_points_outside_is_refused_and_nothing_is_written() -> None:
    source, target = np.zeros((3, 16), dtype=np.uint8), np.full((3, 16), 0xA5, dtype=np.uint8)
    for index in ([0, 1, 3], [0, -1, 1], [0, 1]):
        with pytest.raises(IndexError, match="take_rows"):
            row_loops().take_rows(source, np.array(index), [(0, 3)], [target])
    offsets, position = np.array([0, 1, 2, 3]), np.array([0, 1, 2])
    none = np.array([], dtype=np.int64)
    for spans, places, picked in (
        ([(0, 3)], np.array([0, 1, 3]), None),
        ([(0, 4)], position, None),
        ([(0, 3)], position, none),
        ([(0, 3)], position, np.array([0, 1, 3])),
    ):
        with pytest.raises(IndexError, match="spread_rows"):
            row_loops().spread_rows(spans, [source], [picked], offsets, places, target)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        row_loops().take_rows(source, position, [(0, 1), (1, 2)], [target])
    for wrong in (target[:, ::2], target.reshape(-1), target.view(np.int32)):
        with pytest.raises((ValueError, BufferError)):
            row_loops().take_rows(source, position, [(0, 1)], [wrong])
    with pytest.raises(ValueError, match="an end and a place"):
        row_loops().add_rows(source, 0, np.zeros(0, np.int64), np.zeros((1, 2), np.int64), target)
    assert (target == 0xA5).all()


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    shelf = Shelf(2)
    rows = LEAST_BYTES // 64

    def handed() -> torch.Tensor:
        return torch.from_numpy(shelf.rows(rows, 64)).view(torch.bfloat16)

    first, second = handed(), handed()
    held = first[3:5]  # a view of the first one holds it
    places = {each.untyped_storage().data_ptr() for each in (first, second)}
    assert len(places) == 2
    of_second = second.untyped_storage().data_ptr()
    del first, second
    assert handed().untyped_storage().data_ptr() == of_second, "the one that nobody holds"
    array = held.view(torch.uint8).numpy()[0]
    del held
    third, fourth, fifth = handed(), handed(), handed()  # more than the shelf has are memory of their own
    found = {each.untyped_storage().data_ptr() for each in (third, fourth, fifth)}
    assert len(found) == 3 and len(found & places) == 1 and array.ctypes.data not in found
    assert third.untyped_storage().data_ptr() % 64 == 0
    empty = Shelf(1)
    assert len(empty.rows(MOST_BYTES // 4096 + 1, 4096)) and empty.kept_bytes == 0, "too large to be kept"
    larger = shelf.rows(3 * rows, 64)
    assert larger.shape == (3 * rows, 64) and len(shelf.rows(2, 16)) == 2
