"""Compiled casts have the bits of numpy: all patterns of 16 bits, numbers around every tie, NaN with all payloads."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncfabric._kernels.converting import CASTS
from asyncfabric._kernels.native import native_converting
from asyncfabric.weights.memory.tiles import convert_plane
from asyncfabric.weights.plan.formats import CASTS as ALLOWED
from asyncfabric.weights.plan.formats import STORED_AS, cast
from asyncfabric.weights.plan.parts import MoveKind

pytestmark = pytest.mark.skipif(native_converting() is None, reason="NOTHING WAS COMPILED: make build")


@cache
def patterns(dtype: str) -> NDArray[Any]:
    """Return numbers of a type, (64, any): all of 16 bits; of float32 random ones and what lies around ties of fp16."""
    every = np.arange(65536, dtype=np.uint32)
    if dtype != "float32":
        return every.astype(np.uint16).view(STORED_AS[dtype]).reshape(64, -1)
    halves = every.astype(np.uint16).view(np.float16)[every & 0x7C00 != 0x7C00]
    ties = halves.astype(np.float32).view(np.uint32) + np.uint32(0x1000)
    edges = [np.uint32(at) + every for at in (0x32FF8000, 0x387F8000, 0x477F0000, 0x7F7F8000, 0xFF7F8000, 0)]
    random = np.random.default_rng(4).integers(0, 1 << 32, 1 << 20, np.uint32)
    # what is below the normal range of fp16 has its ties elsewhere: halves between those
    small = ((np.arange(1 << 11, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-24)).view(np.uint32)
    bits = np.concatenate([ties - 1, ties, ties + 1, small - 1, small, small + 1, small | 0x80000000, *edges, random])
    return bits[: len(bits) // 64 * 64].view(np.float32).reshape(64, -1)


def same_bits(plane: NDArray[Any], source: str, target: str, *, turned: bool) -> None:
    memory = np.full(plane.shape[::-1] if turned else plane.shape, 7, STORED_AS[target])
    out = memory.T if turned else memory
    assert convert_plane(out, plane, MoveKind(source, target, 0, 0, 0, 1), None, 0, 0)
    bits = f"u{out.itemsize}"
    with np.errstate(all="ignore"):
        wanted = cast(plane, source, target).view(bits)
    found = np.ascontiguousarray(out).view(bits)
    wrong = np.argwhere(found != wanted)
    assert not len(wrong), (len(wrong), wrong[0], hex(found[tuple(wrong[0])]), hex(wanted[tuple(wrong[0])]))


def test_every_cast_that_a_plan_may_have_is_compiled() -> None:
    assert CASTS == ALLOWED


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize(("source", "target"), sorted(CASTS))
def test_each_pattern_becomes_the_bits_of_numpy(source: str, target: str, turned: bool) -> None:
    same_bits(patterns(source), source, target, turned=turned)
    same_bits(patterns(source)[:37, 5:408], source, target, turned=turned)  # neither whole tiles nor whole vectors


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("columns", [2048, 2051], ids=["lines", "ragged"])
def test_what_is_too_large_for_caches_is_turned_round_too(source: str, target: str, columns: int) -> None:
    many = np.resize(patterns(source).reshape(-1), 2176 * columns).reshape(2176, columns)
    assert many.size * STORED_AS[target].itemsize > 8 << 20
    same_bits(many, source, target, turned=True)
