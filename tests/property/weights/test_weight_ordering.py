"""Boxes put in order and summed in one pass: the bytes of numpy and the sum of xxhash, wherever a box lies."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import asyncfabric as af
from asyncfabric.weights.memory.rows import Strided, order_and_sum, orders
from asyncfabric.weights.sender.filling import UnitFiller
from asyncfabric.weights.sender.program import Program
from asyncfabric.weights.sender.scratch import ScratchStaging
from asyncfabric.weights.sender.shards import open_shards
from asyncfabric_services.bench.weights.workload import plan_of, rows_of

pytest.importorskip("asyncfabric._native._engine")

WHOLE = np.random.default_rng(5).integers(0, 256, 1 << 21, np.uint8)


@st.composite
def boxes(draw: st.DrawFn, stripes: bool = False) -> tuple[Strided, int, np.ndarray]:
    """Draw a box of a C-contiguous shard of up to three dimensions: how it lies, where, and its bytes by numpy.

    With `stripes` its rows are multiples of 64 bytes.
    """
    item = draw(st.sampled_from((1, 2, 4)))
    shape = [draw(st.integers(1, most)) for most in (4, 40, 3000)]
    begin = [draw(st.integers(0, side - 1)) for side in shape]
    size = [draw(st.integers(1, side - first)) for side, first in zip(shape, begin, strict=True)]
    if stripes:
        shape[2] = max(shape[2], 64)
        size[2] = 64 * draw(st.integers(1, shape[2] // 64))
        begin[2] = draw(st.integers(0, shape[2] - size[2]))
    order = [dim for dim in draw(st.sampled_from(((0, 1, 2), (1, 0, 2)))) if size[dim] > 1]
    strides = [item * shape[1] * shape[2], item * shape[2], item]
    at = draw(st.integers(0, 100)) + sum(first * step for first, step in zip(begin, strides, strict=True))
    lies = Strided(tuple(size[dim] for dim in order), tuple(strides[dim] for dim in order), item)
    view = np.ndarray(lies.sizes, np.dtype((np.void, item)), WHOLE, at, lies.strides)
    return lies, at, np.ascontiguousarray(view).reshape(-1).view(np.uint8)


@given(box=boxes(), shift=st.sampled_from((0, 64, 3)), past=st.booleans())
def test_bytes_and_sums_are_those_of_numpy_and_xxhash(
    box: tuple[Strided, int, np.ndarray], shift: int, past: bool
) -> None:
    lies, at, wanted = box
    if not orders(lies):
        return
    memory = np.full(len(wanted) + 256, 0xA5, np.uint8)
    first = -memory.ctypes.data % 64 + shift
    out = memory[first : first + len(wanted)]
    assert order_and_sum(lies, WHOLE, at, out, past) == xxhash.xxh3_64(wanted.tobytes()).intdigest()
    assert np.array_equal(out, wanted)
    assert (memory[:first] == 0xA5).all() and (memory[first + len(wanted) :] == 0xA5).all()


@given(rows=st.integers(1, 9), run=st.integers(256, 600), beyond=st.integers(1, 1 << 40))
def test_a_box_that_leaves_its_memory_is_refused(rows: int, run: int, beyond: int) -> None:
    memory, out = np.zeros(rows * 1000, np.uint8), np.zeros(rows * run, np.uint8)
    lies = Strided((rows, run), (1000, 1), 1) if rows > 1 else Strided((run,), (1,), 1)
    last = len(memory) - (rows - 1) * 1000 - run
    assert order_and_sum(lies, memory, last, out, False) is not None
    for at in (last + beyond, -beyond):
        with pytest.raises(IndexError, match="leave"):
            order_and_sum(lies, memory, at, out, False)
    with pytest.raises(IndexError, match="do not fit"):
        order_and_sum(lies, memory, 0, out[1:], False)


@pytest.mark.anyio
async def test_columns_of_a_shard_go_through_the_one_pass() -> None:
    """Matrices of which a receiver wants columns are put in order so, the others are written from where they lie."""
    plan = plan_of(trainers=2, receivers=2, replicas=1, matrices=2, side=512, form="copy")
    held = {f"matrix {number}": rows_of(number, 512, 0, 256, 0, "copy") for number in range(2)}
    async with af.open_fabric() as fabric, open_shards(fabric, plan, 0, held) as shards:
        program = Program(plan, 0, shards)
        assert [box.lies is not None for box in program.boxes] == [box.staged_bytes > 0 for box in program.boxes]
        assert any(box.lies is not None for box in program.boxes)
        (unit,) = program.units(1 << 30)
        region = await fabric.allocate(unit.staged_bytes, access="local")
        filled = UnitFiller(shards, ScratchStaging(region), "xxh3").fill_here(unit, 0, [None] * len(unit.boxes))
        staged, at = np.frombuffer(region.memory, np.uint8), 0
        for box, found in zip(unit.boxes, filled.sums.result(), strict=True):
            wanted = shards.box(box.parameter, box.local_start, box.size)
            assert found == xxhash.xxh3_64(np.ascontiguousarray(wanted).tobytes()).intdigest()
            if box.lies is not None:
                assert np.array_equal(
                    staged[at : at + box.weight_bytes], np.ascontiguousarray(wanted).reshape(-1).view(np.uint8)
                )
            at += box.staged_bytes
        await region.release()
