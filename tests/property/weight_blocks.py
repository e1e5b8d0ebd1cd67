"""Boxes of whole quantisation blocks, compared with what the host makes of them, on a processor and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.memory.device import Device, Measured, PlacedBox
from asyncfabric.weights.memory.host import HostDevice
from asyncfabric.weights.plan.formats import BLOCK, STORED_AS, cast, scales_of
from asyncfabric.weights.plan.parts import MoveKind

INTS = {2: np.int16, 4: np.int32}
ORDERS = (((0, 1, 2, 3), [0, 1, 2, 3]), ((1, 0, 3, 2), [1, 0, 3, 2]), ((0, 1, 3, 2), [2, 0, 1, 3]))
"""Of the weights and of the scales, outermost first."""


def awkward(dtype: str, rows: int, columns: int) -> NDArray[Any]:
    """Return (2, 3, rows, columns): numbers in the middle of two codes, tiny, huge, infinite, and none at all."""
    random = np.random.default_rng(rows + columns)
    shape = (2, 3, rows, columns)
    floats = (random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, (2, 3, rows, 1))).astype("<f4")
    floats[0, 0] = np.sign(floats[0, 0]) * np.ldexp(random.integers(0, 57, (rows, columns)), -9)
    floats[0, 0, ::BLOCK, ::BLOCK] = 448.0  # the scale of every block is 1
    floats[0, 1] *= np.float32(1e-42)
    floats[0, 2] *= np.float32(1e-4)
    if dtype != "float16":
        floats[1, 0] = np.abs(floats[1, 0]) * np.float32(1e34)
        part = floats[1, 1, :, : columns // 2].reshape(-1)
        part[random.integers(0, part.size, 5)] = [np.inf, -np.inf, np.nan, -np.nan, -0.0]
        floats[1, 1, :, : columns // 2] = part.reshape(rows, -1)
    return floats if dtype == "float32" else cast(floats, "float32", dtype)


def check_whole_blocks(
    device: Device, dtype: str, rows: int, columns: int, put: Callable[[Any], Any], take: Callable[[Any], Any]
) -> None:
    """WT-5: scales and float8 are those that maxima reported by the host make; `put` and `take` move arrays."""
    host, kind = HostDevice(), MoveKind(dtype=dtype, to="float8_e4m3fn", block=BLOCK, source=0, first=0, count=1)
    start = np.zeros(4, np.int64)
    with np.errstate(all="ignore"):
        shard = awkward(dtype, rows, columns)
        bits = put(shard.view(INTS[STORED_AS[dtype].itemsize]))
        maxima = host.measure([Measured(shard, start, kind)])[0]
        for order, scale_order in ORDERS:
            sizes, axes = [shard.shape[axis] for axis in order], np.argsort(order).tolist()
            expected, scales = np.empty(shard.size, np.uint8), scales_of(maxima).transpose(scale_order)
            host.convert(expected, sizes, axes, shard, kind, maxima, start, start)
            how = device.described(bits, kind, sizes, axes, scale_order)
            assert how is not None
            memory = put(np.full(64 + shard.size + scales.size * 4, 0x55, np.uint8))
            device.laying([PlacedBox(how, memory, 64, 64 + shard.size)])()
            device.finish()
            before, found, reported = np.split(take(memory), [64, 64 + shard.size])
            assert (before == 0x55).all()
            assert np.array_equal(reported.view("<f4"), np.ascontiguousarray(scales).reshape(-1), equal_nan=True)
            assert np.array_equal(found, expected)


def check_laid(
    device: Device, dtype: str, to: str, rows: int, columns: int, put: Callable[[Any], Any], take: Callable[[Any], Any]
) -> None:
    """WT-5: what is cast and put in order is what the host makes of it."""
    host, kind = HostDevice(), MoveKind(dtype=dtype, to=to, block=0, source=0, first=0, count=1)
    start, item = np.zeros(4, np.int64), STORED_AS[to].itemsize
    bits = quiet_bits(dtype, (2, 3, rows, columns + 8))
    held = put(bits.view(INTS[bits.itemsize]))[..., 4 : columns + 4]
    shard = bits[..., 4 : columns + 4]
    with np.errstate(all="ignore"):
        for order, _ in ORDERS:
            sizes, axes = [shard.shape[axis] for axis in order], np.argsort(order).tolist()
            expected = np.empty(shard.size * item, np.uint8)
            host.convert(expected, sizes, axes, shard, kind, None, start, start)
            how = device.described(held, kind, sizes, axes, [])
            assert how is not None
            found = put(np.full(expected.size, 0x55, np.uint8))
            device.laying([PlacedBox(how, found, 0, 0)])()
            device.finish()
            assert np.array_equal(take(found), expected)


def quiet_bits(dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return random bits, among which no NaN signals."""
    random = np.random.default_rng(shape[-1])
    width = STORED_AS[dtype].itemsize
    bits = random.integers(0, 1 << (8 * width), shape, np.uint64).astype(f"<u{width}")
    bits[..., ::3, :] &= np.array((1 << (8 * width - 2)) - 1, bits.dtype) | np.array(
        1 << (8 * width - 1), bits.dtype
    )  # small
    exponent, quiet = {"bfloat16": (0x7F80, 0x40), "float16": (0x7C00, 0x200), "float32": (0x7F800000, 0x400000)}[dtype]
    bits[(bits & exponent == exponent) & (bits & (quiet - 1) != 0)] |= np.array(quiet, bits.dtype)
    return bits.view(STORED_AS[dtype])
