"""Sums of many boxes in one compiled call: those of xxhash, whatever they are made of; nothing outside is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric._kernels.native import native_box_sums
from asyncfabric.weights.memory import host as summing
from asyncfabric.weights.memory.device import Stretch
from asyncfabric.weights.memory.host import BoxTable, HostDevice
from asyncfabric.weights.memory.rows import Strided

pytest.importorskip("asyncfabric._native._engine")

MEMORY = np.random.default_rng(11).integers(0, 256, 1 << 18, np.uint8)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[Strided, int]:
    """Draw runs of any length, in up to three dimensions, and where they begin."""
    run = draw(st.one_of(st.integers(1, 70), st.integers(60, 200), st.sampled_from((64, 128, 1024, 4096))))
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    strides: list[int] = []
    span = run
    for size in reversed(sizes):
        step = span + draw(st.integers(0, 40))
        strides.insert(0, step)
        span = step * (size - 1) + span
    return Strided((*sizes, run), (*strides, 1), 1), draw(st.integers(0, len(MEMORY) - span))


boxes = st.lists(st.lists(stretches(), min_size=1, max_size=3), max_size=6)


def by_xxhash(box: list[tuple[Strided, int]]) -> int:
    digest = xxhash.xxh3_64()
    for lies, at in box:
        digest.update(np.ascontiguousarray(np.ndarray(lies.sizes, np.uint8, MEMORY, at, lies.strides)).tobytes())
    return digest.intdigest()


@given(boxes, st.data())
def test_sums_are_those_of_xxhash(given_boxes: list[list[tuple[Strided, int]]], data: st.DataObject) -> None:
    table = BoxTable(given_boxes)
    wanted = data.draw(st.lists(st.sampled_from(range(len(given_boxes))), max_size=12) if given_boxes else st.just([]))
    assert table.sums(MEMORY, wanted) == [by_xxhash(given_boxes[number]) for number in wanted]


def test_long_boxes_are_summed_by_the_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 64 bytes and more, of 241 bytes and more in all."""

    def never(*_: Any) -> int:
        raise AssertionError("it was summed in Python")

    monkeypatch.setattr(summing, "checksum", never)
    box = [(Strided((3, 100), (150, 1), 1), 7), (Strided((64,), (1,), 1), 3000)]
    assert BoxTable([box]).sums(MEMORY, [0, 0]) == [by_xxhash(box)] * 2
    with pytest.raises(AssertionError, match="in Python"):
        BoxTable([[(Strided((240,), (1,), 1), 0)]]).sums(MEMORY, [0])


def test_without_anything_compiled_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    box = [(Strided((5, 256), (300, 1), 1), 1)]
    monkeypatch.setattr(summing, "_make", lambda: None)
    assert BoxTable([box]).sums(MEMORY, [0]) == [by_xxhash(box)]


@given(st.integers(241, 500), st.integers(1, 1 << 40))
def test_a_box_that_leaves_its_memory_is_refused(length: int, beyond: int) -> None:
    lies = Strided((length,), (1,), 1)
    last = len(MEMORY) - length
    assert BoxTable([[(lies, last)]]).sums(MEMORY, [0]) == [by_xxhash([(lies, last)])]
    with pytest.raises(IndexError, match="reach"):
        BoxTable([[(lies, last + beyond)]]).sums(MEMORY, [0])
    with pytest.raises(ValueError, match="columns"):
        BoxTable([[(lies, -beyond)]])


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    "columns",
    [
        (ints(), ints(), ints(), ints(0), ints(), ints()),  # no end of the last box
        (ints(0, 1), ints(0), ints(300), ints(0), ints(), ints()),  # no end of the last stretch
        (ints(0, 2), ints(0), ints(300), ints(0, 0), ints(), ints()),  # a stretch that is not there
        (ints(0, 2, 1), ints(0), ints(300), ints(0, 0), ints(), ints()),  # back again
        (ints(1, 1), ints(0), ints(300), ints(0, 0), ints(), ints()),  # a stretch of nobody
        (ints(0, 1), ints(0, 1), ints(300), ints(0, 0), ints(), ints()),
        (ints(0, 1), ints(0), ints(300), ints(0, 1), ints(), ints()),
        (ints(0, 1), ints(0), ints(300), ints(0, 1), ints(2), ints()),
        (ints(0, 1), ints(0), ints(0), ints(0, 0), ints(), ints()),
        (ints(0, 1), ints(0), ints(300), ints(0, 1), ints(2), ints(-300)),
        (ints(0, 1), ints(0), ints(300), ints(0, 1), ints(0), ints(300)),
        (ints(0, 1), ints(0), ints(240), ints(0, 0), ints(), ints()),  # too small
        (ints(0, 0), ints(), ints(), ints(0), ints(), ints()),  # a box of nothing
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(columns: tuple[Any, ...]) -> None:
    make = native_box_sums()
    assert make is not None
    with pytest.raises(ValueError, match="columns do not fit"):
        make(*columns)


@pytest.mark.parametrize(("numbers", "sums"), [((1,), 1), ((-1,), 1), ((0, 0), 1), ((), 1), ((0,), 0)])
def test_numbers_that_are_none_of_the_table_are_refused(numbers: tuple[int, ...], sums: int) -> None:
    make = native_box_sums()
    assert make is not None
    table = make(ints(0, 1), ints(0), ints(300), ints(0, 0), ints(), ints())
    with pytest.raises(IndexError, match="number"):
        table.sum(MEMORY, ints(*numbers), np.zeros(sums, np.uint64))
    nothing = make(ints(0), ints(), ints(), ints(0), ints(), ints())
    nothing.sum(MEMORY[:0], ints(), np.zeros(0, np.uint64))
    with pytest.raises(IndexError, match="number"):
        nothing.sum(MEMORY, ints(0), np.zeros(1, np.uint64))


def test_stretches_of_several_memories_are_summed_one_by_one() -> None:
    other = MEMORY[::-1].copy()
    lies = Strided((500,), (1,), 1)
    parts = [[Stretch(MEMORY, lies, 3)], [Stretch(MEMORY, lies, 9), Stretch(other, lies, 5)]]
    wanted = [by_xxhash([(lies, 3)]), xxhash.xxh3_64(bytes(MEMORY[9:509]) + bytes(other[5:505])).intdigest()]
    assert HostDevice().summing("xxh3", parts)([1, 0]).result() == wanted[::-1]
