"""Checksums of weights, chunk by chunk, so that one wrong chunk is named. Pure functions.

XXH3 with 64 bits, or where a GPU takes part `word_sums`: both are meant against flipped and missing bytes, not against
an enemy; peers are authenticated elsewhere. Every message with checksums says which it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import xxhash

from asyncfabric.weights.commit.word_sums import word_sum

CHUNK_BYTES = 16 << 20

ChecksumKind = Literal["xxh3", "words"]
"""Which checksum: XXH3, quickest on processors, or `word_sums`, which GPUs can do too."""


def checksum(parts: Iterable[np.ndarray], kind: ChecksumKind = "xxh3") -> int:
    """Return the checksum of one-dimensional uint8 arrays, one after the other.

    For "words" each of them is a stretch of its own; for "xxh3" it does not matter where they are cut.
    """
    if kind == "words":
        return word_sum(parts)
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return digest.intdigest()


def chunks_of(length_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Yield the byte ranges of the chunks of a region; the last one may be shorter."""
    for begin in range(0, length_bytes, chunk_bytes):
        yield slice(begin, min(begin + chunk_bytes, length_bytes))


def checksums(memory: np.ndarray, chunk_bytes: int = CHUNK_BYTES, kind: ChecksumKind = "xxh3") -> np.ndarray:
    """Return one uint64 for each chunk of a one-dimensional uint8 array."""
    return np.fromiter((checksum((memory[part],), kind) for part in chunks_of(memory.size, chunk_bytes)), np.uint64)


def wrong_chunks(found: np.ndarray, expected: np.ndarray) -> list[int]:
    """Return the numbers of the chunks whose checksums differ.

    Raises ValueError when there are more or fewer chunks than checksums.
    """
    if found.size != expected.size:
        raise ValueError(f"there are {found.size} chunks, got {expected.size} checksums")
    return [int(index) for index in np.flatnonzero(found != expected)]
