"""Delta: the elements that changed since a version that the receiver holds, where they are and by how much. Pure.

    [elements][changed][gaps, bytes] | gaps between changed elements | planes of the differences

A small learning rate moves few bfloat16 weights per step, and those mostly to the next number: the difference of the
bit patterns is 1 up or down, and nearly free. Differences are taken modulo the width, so that any two patterns (NaN,
zero of either sign, another number altogether) come out exactly.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.coding.streams import Bytes, from_planes, last_planes, packed, planes, unpacked, words

_HEADER = struct.Struct("<QQQ")
_MORE = 255  # a gap byte that says: 255 unchanged elements, and the gap goes on


def encode_delta(old: Bytes, new: Bytes, item_bytes: int) -> bytes | None:
    """Return the message that turns `old` into `new`, or None when it would not be shorter than `new`.

    Args:
        old: what the receiver holds, uint8, one dimension.
        new: what it shall hold, as long.
        item_bytes: of an element: 1, 2 or 4.

    Raises ValueError when the lengths differ or hold no whole elements.
    """
    before, after = words(old, item_bytes), words(new, item_bytes)
    if before.size != after.size:
        raise ValueError(f"both versions must be equally long, got {old.size} and {new.size} bytes")
    where = np.flatnonzero(before != after)
    if where.size * 2 > before.size:
        return None  # half of it changed: a byte for the gap and one for the difference are no gain
    gaps = _gap_bytes(where)
    steps = planes(_zigzag(after[where] - before[where]))
    header = _HEADER.pack(before.size, where.size, gaps.size)
    message = b"".join([header, packed(gaps), *(packed(plane) for plane in steps)])
    return message if len(message) < new.size else None


def apply_delta(memory: Bytes, message: bytes | memoryview, item_bytes: int) -> int:
    """Turn the old version in `memory` into the new one, in place; return how many elements changed.

    Args:
        memory: the old version, uint8, one dimension, writable.
        message: of `encode_delta`.
        item_bytes: of an element, as when encoding.

    Raises ValueError when the message is damaged or not for memory of this length; `memory` is unchanged then. A
    message for another old version of the same length cannot be told from a right one: checksums are for that.
    """
    held = words(memory, item_bytes)
    view = memoryview(message)
    if len(view) < _HEADER.size:
        raise ValueError(f"a delta begins with {_HEADER.size} bytes, got {len(view)}")
    elements, changed, gap_bytes = _HEADER.unpack_from(view)
    if elements != held.size or changed > elements or not changed <= gap_bytes <= changed + elements // _MORE + 1:
        raise ValueError(f"a delta of {changed} of {elements} elements ({gap_bytes} gap bytes) for {held.size}")
    gaps, at = unpacked(view, _HEADER.size, gap_bytes)
    parts = last_planes(view, at, changed, item_bytes)
    where = _positions(gaps)
    if where.size != changed or (changed and where[-1] >= elements):
        raise ValueError(f"a delta says {changed} changed elements of {elements}, its gaps say otherwise")
    held[where] += _unzigzag(from_planes(parts).view(held.dtype))
    return int(changed)


def _gap_bytes(where: NDArray[np.int64]) -> Bytes:
    """Return the numbers of unchanged elements before each changed one, as bytes; 255 and on with a byte more."""
    gaps = np.diff(where, prepend=-1) - 1
    extra = gaps // _MORE
    if not extra.any():
        return gaps.astype(np.uint8)
    ends = np.cumsum(extra + 1) - 1
    stream = np.full(int(ends[-1]) + 1, _MORE, np.uint8)
    stream[ends] = gaps % _MORE
    return stream


def _positions(gaps: Bytes) -> NDArray[np.int64]:
    ends = np.flatnonzero(gaps != _MORE)
    if gaps.size and (not ends.size or ends[-1] != gaps.size - 1):
        raise ValueError("the last gap of a delta does not end")
    return np.asarray(np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size))


def _zigzag(steps: NDArray[Any]) -> NDArray[Any]:
    """Return steps up and down by n as 2n and 2n - 1, so that small ones have high bytes of zero."""
    top = steps.dtype.itemsize * 8 - 1
    return np.asarray((steps << 1) ^ (0 - (steps >> top)))


def _unzigzag(steps: NDArray[Any]) -> NDArray[Any]:
    return np.asarray((steps >> 1) ^ (0 - (steps & 1)))
