"""Checksums of weights, chunk by chunk, so that one wrong chunk is named. Pure functions.

XXH3 with 64 bits: meant against flipped and missing bytes, not against an enemy; peers are authenticated elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

CHUNK_BYTES = 16 << 20


def chunks_of(length_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Yield the byte ranges of the chunks of a region; the last one may be shorter."""
    for begin in range(0, length_bytes, chunk_bytes):
        yield slice(begin, min(begin + chunk_bytes, length_bytes))


def checksums(memory: np.ndarray, chunk_bytes: int = CHUNK_BYTES) -> np.ndarray:
    """Return one uint64 for each chunk of a one-dimensional uint8 array."""
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(memory[part].data) for part in chunks_of(memory.size, chunk_bytes)), dtype=np.uint64
    )


def wrong_chunks(memory: np.ndarray, expected: np.ndarray, chunk_bytes: int = CHUNK_BYTES) -> list[int]:
    """Return the numbers of the chunks whose checksums differ.

    Raises ValueError when there are more or fewer chunks than checksums.
    """
    found = checksums(memory, chunk_bytes)
    if found.size != expected.size:
        raise ValueError(f"{memory.size} bytes are {found.size} chunks of {chunk_bytes}, got {expected.size} checksums")
    return [int(index) for index in np.flatnonzero(found != expected)]
