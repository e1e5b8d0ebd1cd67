"""Codings of weights: changed elements against a base (delta), and the exponents of bfloat16. Pure functions.

Both are lossless; zstd, a maintained library, codes the streams. A coding that makes a row no shorter returns None.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LEVEL = 1
"""Higher levels look for repetitions, which weights have none of: they cost twice the time for the same bytes."""

_LENGTHS = struct.Struct("<QQ")  # of the stream, and of what stands for it; equal lengths mean that it is raw


def packed(stream: NDArray[Any]) -> bytes:
    """Return a contiguous array as one stream of a message."""
    raw = stream.reshape(-1).view(np.uint8)
    shorter = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(raw.data) if raw.size else b""
    if len(shorter) >= raw.size:
        shorter = raw.tobytes()
    return _LENGTHS.pack(raw.size, len(shorter)) + shorter


def unpacked(message: memoryview, at: int, length_bytes: int) -> tuple[Bytes, int]:
    """Return (the stream that begins at `at`, where the next one begins).

    Raises ValueError when it is not `length_bytes` long or the message is damaged; allocates no more than that.
    """
    if len(message) < at + _LENGTHS.size:
        raise ValueError(f"a coded message of {len(message)} bytes ends before the stream at {at}")
    raw, stored = _LENGTHS.unpack_from(message, at)
    begin = at + _LENGTHS.size
    if raw != length_bytes or stored > raw or begin + stored > len(message):
        raise ValueError(f"the stream at {at} states {raw} bytes in {stored}, expected {length_bytes}")
    body = message[begin : begin + stored]
    if stored == raw:
        return np.frombuffer(body, np.uint8), begin + stored
    try:
        if zstandard.frame_content_size(body) != raw:
            raise ValueError(f"the stream at {at} unpacks to another length than {raw}")
        text = zstandard.ZstdDecompressor().decompress(body, max_output_size=raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"the stream at {at} is damaged: {error}") from None
    return np.frombuffer(text, np.uint8), begin + stored


def last_planes(message: memoryview, at: int, length_bytes: int, count: int) -> list[Bytes]:
    """Return the `count` streams that end a message, each `length_bytes` long.

    Raises ValueError when one is damaged or something follows.
    """
    parts = []
    for _ in range(count):
        plane, at = unpacked(message, at, length_bytes)
        parts.append(plane)
    if at != len(message):
        raise ValueError(f"a coded message of {at} bytes is followed by {len(message) - at} more")
    return parts


def planes(elements: NDArray[Any]) -> NDArray[np.uint8]:
    """Return little-endian integers as planes of bytes, shape [item bytes, elements]: the lowest bytes first."""
    return np.ascontiguousarray(elements.reshape(-1).view(np.uint8).reshape(-1, elements.dtype.itemsize).T)


def from_planes(parts: list[Bytes]) -> Bytes:
    """Return the bytes of the integers whose planes these are; the inverse of `planes`."""
    return np.ascontiguousarray(np.stack(parts, axis=1)).reshape(-1)


def words(memory: Bytes, item_bytes: int) -> NDArray[Any]:
    """Return memory as unsigned integers of `item_bytes`: 1, 2 or 4; a view.

    Raises ValueError when it is not made of whole ones.
    """
    if item_bytes not in (1, 2, 4) or memory.dtype != np.uint8 or memory.ndim != 1 or memory.size % item_bytes:
        raise ValueError(
            f"expected one dimension of uint8 in whole elements of 1, 2 or 4 bytes, got {memory.shape} of "
            f"{memory.dtype} with elements of {item_bytes}"
        )
    return memory.view(f"<u{item_bytes}")


_DELTA_HEADER = struct.Struct("<QQQ")

_MORE = 255  # a gap byte that states: 255 unchanged elements, and the gap goes on


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
    header = _DELTA_HEADER.pack(before.size, where.size, gaps.size)
    message = b"".join([header, packed(gaps), *(packed(plane) for plane in steps)])
    return message if len(message) < new.size else None


def apply_delta(memory: Bytes, message: bytes | memoryview, item_bytes: int) -> int:
    """Turn the old version in `memory` into the new one, in place; return how many elements changed.

    Args:
        memory: the old version, uint8, one dimension, writable.
        message: of `encode_delta`.
        item_bytes: of an element, as when encoding.

    Raises ValueError when the message is damaged or not for memory of this length; `memory` is unchanged then. A
    message for another old version of the same length cannot be distinguished from a right one: checksums are for that.
    """
    held = words(memory, item_bytes)
    view = memoryview(message)
    if len(view) < _DELTA_HEADER.size:
        raise ValueError(f"a delta begins with {_DELTA_HEADER.size} bytes, got {len(view)}")
    elements, changed, gap_bytes = _DELTA_HEADER.unpack_from(view)
    if elements != held.size or changed > elements or not changed <= gap_bytes <= changed + elements // _MORE + 1:
        raise ValueError(f"a delta of {changed} of {elements} elements ({gap_bytes} gap bytes) for {held.size}")
    gaps, at = unpacked(view, _DELTA_HEADER.size, gap_bytes)
    parts = last_planes(view, at, changed, item_bytes)
    where = _positions(gaps)
    if where.size != changed or (changed and where[-1] >= elements):
        raise ValueError(f"a delta states {changed} changed elements of {elements}, its gaps state otherwise")
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


_EXPONENT_HEADER = struct.Struct("<Q")


def encode_exponents(new: Bytes, item_bytes: int) -> bytes | None:
    """Return the message for these weights, or None when it would not be shorter.

    Args:
        new: stored floating numbers, uint8, one dimension.
        item_bytes: of an element: 2 or 4; for 1 there is nothing to split, and all is tried as one plane.
    """
    elements = words(new, item_bytes)
    parts = planes(_turned(elements, 1))
    message = b"".join([_EXPONENT_HEADER.pack(elements.size), *(packed(plane) for plane in parts[::-1])])
    return message if len(message) < new.size else None


def decode_exponents(memory: Bytes, message: bytes | memoryview, item_bytes: int) -> None:
    """Put the weights into `memory`, uint8, one dimension, writable.

    Raises ValueError when the message is damaged or not for memory of this length; `memory` is unchanged then.
    """
    held = words(memory, item_bytes)
    view = memoryview(message)
    if len(view) < _EXPONENT_HEADER.size:
        raise ValueError(f"coded exponents begin with {_EXPONENT_HEADER.size} bytes, got {len(view)}")
    elements = _EXPONENT_HEADER.unpack_from(view)[0]
    if elements != held.size:
        raise ValueError(f"coded exponents of {elements} elements, for memory of {held.size}")
    parts = last_planes(view, _EXPONENT_HEADER.size, elements, item_bytes)
    held[:] = _turned(from_planes(parts[::-1]).view(held.dtype), held.dtype.itemsize * 8 - 1)


def _turned(elements: NDArray[Any], bits: int) -> NDArray[Any]:
    """Return integers rotated to the left."""
    return np.asarray((elements << bits) | (elements >> (elements.dtype.itemsize * 8 - bits)))
