"""Random bytes that both ends can make from one seed, poison, random page lists, and the check of what arrived.

Both ends hold the same seed, so that the target knows what must have arrived without receiving it through the fabric
under test.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Pages = NDArray[np.int64]

POISON = 0xA5
"""What target memory holds before the run; the source is random, so a byte that was never written shows."""

CHUNK_BYTES = 8 * 1024 * 1024


def random_bytes(length: int, seed: int) -> Bytes:
    """Return `length` random bytes, the same for the same seed."""
    words = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, size=(length + 7) // 8, dtype=np.uint64)
    return words.view(np.uint8)[:length]


def page_list(room: int, count: int, seed: int) -> Pages:
    """Return `count` distinct random pages out of `room`, in random order; raises ValueError when there are too few."""
    if not 0 <= count <= room:
        raise ValueError(f"{count} distinct pages do not fit into a region of {room} pages")
    return np.random.Generator(np.random.SFC64(seed)).permutation(room)[:count].astype(np.int64)


def first_difference(target: Bytes, expected: Bytes) -> int | None:
    """Return the offset of the first byte that differs, None when all are equal."""
    if target.size != expected.size:
        raise ValueError(f"cannot compare {target.size} bytes with {expected.size}")
    for start in range(0, target.size, CHUNK_BYTES):
        ours, theirs = target[start : start + CHUNK_BYTES], expected[start : start + CHUNK_BYTES]
        if not np.array_equal(ours, theirs):
            return start + int(np.flatnonzero(ours != theirs)[0])
    return None


def expect_prefix(sent: Bytes, written: int) -> Bytes:
    """Return what a poisoned target holds after bytes [0, written) arrived, and nothing else."""
    expected = np.full(sent.size, POISON, dtype=np.uint8)
    expected[:written] = sent[:written]
    return expected


def expect_pages(sent: Bytes, lists: Iterable[tuple[Pages, Pages]], page_bytes: int) -> Bytes:
    """Return what a poisoned target holds after lists of (source pages, target pages) arrived one after the other."""
    expected = np.full(sent.size, POISON, dtype=np.uint8)
    rows = expected[: sent.size // page_bytes * page_bytes].reshape(-1, page_bytes)
    sources = sent[: sent.size // page_bytes * page_bytes].reshape(-1, page_bytes)
    for source_pages, target_pages in lists:
        rows[target_pages] = sources[source_pages]
    return expected


def verdict(target: Bytes, expected: Bytes) -> str:
    """Return "" when the target holds exactly what is expected, otherwise a sentence about the first wrong byte."""
    wrong = first_difference(target, expected)
    if wrong is None:
        return ""
    return f"byte {wrong} is {int(target[wrong])} instead of {int(expected[wrong])}"
