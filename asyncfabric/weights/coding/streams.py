"""Streams of bytes of a coded message: each raw, or as one Zstandard frame where that is shorter. Pure functions.

Zstandard is the entropy coder: a maintained library, which releases the GIL. A message is a header of its coding and
then its streams; who reads one knows from the header how long each stream must be.
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

_LENGTHS = struct.Struct("<QQ")  # of the stream, and of what stands for it; equal lengths say that it is raw


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
        raise ValueError(f"the stream at {at} says {raw} bytes in {stored}, expected {length_bytes}")
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
