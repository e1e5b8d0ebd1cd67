"""Checksums of weights, chunk by chunk, so that one wrong chunk is named. Pure functions.

XXH3 with 64 bits, or where a GPU takes part `word_sum`, which GPUs can do too: both are meant against flipped and
missing bytes, not against an enemy; peers are authenticated elsewhere. Every message with checksums names their kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncfabric._kernels.native import native_sum_words

FIRST, SECOND = 0x9E3779B1, 0x85EBCA77
"""Odd factors of the bijections."""

OFFSET = 0x6A09E667
"""Added to words and places first, so that zeros count."""

LENGTH = 0x9FB21C651E98DF25
"""What the length is multiplied with."""

MASK64 = (1 << 64) - 1

BLOCK_WORDS = 1 << 15


_compiled = cache(native_sum_words)


def word_sum(parts: Iterable[NDArray[np.uint8]]) -> int:
    """Return the checksum of stretches of bytes, one after the other; each is filled up to whole words by zeros."""
    sum_of = _compiled() or sum_words
    total = length = place = 0
    for part in parts:
        total += sum_of(np.ascontiguousarray(part), place)
        place += -(-part.size // 4)
        length += part.size
    return finished(total, length)


def finished(total: int, length_bytes: int) -> int:
    """Return the checksum of a sum of products and the bytes that it is over."""
    found = (total + length_bytes * LENGTH) & MASK64
    found ^= found >> 32
    found = found * LENGTH & MASK64
    return found ^ found >> 29


def sum_words(data: NDArray[np.uint8], place: int) -> int:
    """Do what the compiled sum does, where nothing was compiled; see asyncfabric._kernels.summing."""
    total, bytes_, last = 0, 4 * BLOCK_WORDS, -data.size % 4
    for at in range(0, data.size, bytes_):
        block = data[at : at + bytes_]
        words = (np.append(block, np.zeros(last, np.uint8)) if block.size % 4 else block).view("<u4")
        begin = (place + at // 4) & 0xFFFFFFFF
        places = np.arange(begin, begin + words.size, dtype=np.uint64).astype(np.uint32)
        places += np.uint32(OFFSET)
        places *= np.uint32(FIRST)
        places ^= places >> 15
        places *= np.uint32(SECOND)
        places ^= places >> 16
        factors = places.astype(np.uint64)
        factors += factors
        factors += np.uint64(1)
        mixed = words + np.uint32(OFFSET)
        mixed *= np.uint32(FIRST)
        mixed ^= mixed >> 15
        factors *= mixed
        total += int(factors.sum(dtype=np.uint64))
    return total & MASK64


CHUNK_BYTES = 16 << 20

ChecksumKind = Literal["xxh3", "words"]
"""Which checksum: XXH3, quickest on processors, or `word_sum`, which GPUs can do too."""


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
