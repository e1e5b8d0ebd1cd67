"""Word sums: the checksum that GPUs and numpy both work out: sums of words times odd factors of their places.

Pure; kernels and torch equal it bit for bit. With m, a bijection of 32-bit words, and t, another one, the sum of
`t(word) * (2 * m(place) + 1)` modulo 2**64 is taken, then the length is mixed in.

What it finds for certain: any change within one word, so any flipped byte, since an odd factor takes nothing from a
difference; any two different words that change places, since two factors differ by less than 2**33 and two words by
less than 2**32, so that the product of both differences has fewer than 64 factors of two. Everything else is left to
chance, about one in 2**60 if the factors are as good as random; there is no secret in it, so collisions can be made on
purpose.

Rows of 2**34 bytes and more would repeat factors; no row is as long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

FIRST, SECOND = 0x9E3779B1, 0x85EBCA77
"""Odd factors of the bijections."""

OFFSET = 0x6A09E667
"""Added to words and places first, so that zeros count."""

LENGTH = 0x9FB21C651E98DF25
"""What the length is multiplied with."""

MASK64 = (1 << 64) - 1
BLOCK_WORDS = 1 << 15


def word_sum(parts: Iterable[NDArray[np.uint8]]) -> int:
    """Return the checksum of stretches of bytes, one after the other; each is filled up to whole words by zeros."""
    total = length = place = 0
    for part in parts:
        whole = part.size // 4
        words = part[: 4 * whole]
        total += _sum(np.ascontiguousarray(words).view("<u4"), place)
        if part.size % 4:
            tail = np.zeros(4, np.uint8)
            tail[: part.size % 4] = part[4 * whole :]
            total += _sum(tail.view("<u4"), place + whole)
        place += -(-part.size // 4)
        length += part.size
    return finished(total, length)


def finished(total: int, length_bytes: int) -> int:
    """Return the checksum of a sum of products and the bytes that it is over."""
    found = (total + length_bytes * LENGTH) & MASK64
    found ^= found >> 32
    found = found * LENGTH & MASK64
    return found ^ found >> 29


def _sum(words: NDArray[np.uint32], place: int) -> int:
    total = 0
    for low in range(0, words.size, BLOCK_WORDS):
        some = words[low : low + BLOCK_WORDS]
        places = np.arange(place + low, place + low + some.size, dtype=np.uint32)
        places += np.uint32(OFFSET)
        places *= np.uint32(FIRST)
        places ^= places >> 15
        places *= np.uint32(SECOND)
        places ^= places >> 16
        factors = places.astype(np.uint64)
        factors += factors
        factors += np.uint64(1)
        mixed = some + np.uint32(OFFSET)
        mixed *= np.uint32(FIRST)
        mixed ^= mixed >> 15
        factors *= mixed
        total += int(factors.sum(dtype=np.uint64))
    return total
