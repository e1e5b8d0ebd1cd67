"""Checksums of what lies in the same places version after version: told to the kernel once, whichever are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.update.cuda.kernels import STRETCH, Kernels
from asyncfabric.weights.update.cuda.sums import LaunchedSums, lies_for_kernel
from asyncfabric.weights.update.device import Stretch

_WHICH = slice(STRETCH.size - 12, STRETCH.size - 8)
"""Of a STRETCH, what is told anew each time: which checksum it is a part of."""


class Packed(NamedTuple):
    """Stretches of many checksums.

    Attributes:
        entries: a STRETCH in each row.
        first, counts: by checksum: where its entries begin, and how many they are.
        words: by checksum: of its largest stretch.
        lengths: by checksum: bytes.
    """

    entries: NDArray[np.uint8]
    first: Ints
    counts: Ints
    words: Ints
    lengths: list[int]


def packed(stretches: Sequence[Sequence[Stretch]]) -> Packed | None:
    """Return the stretches of checksums as the kernel takes them; None if it cannot read one of them word by word."""
    entries: list[bytes] = []
    count, largest, lengths = [], [], []
    for parts in stretches:
        place = whole = most = 0
        for memory, lies, at in parts:
            address = memory.data_ptr() + at
            told = lies_for_kernel(lies, address % 16)
            if told is None:
                return None
            strides, sizes, run_words, vector = told
            words, tail = divmod(lies.nbytes, 4)
            entries.append(STRETCH.pack(address, words, place, *strides, *sizes, run_words, 0, tail, vector))
            place += -(-lies.nbytes // 4)
            whole += lies.nbytes
            most = max(most, words)
        count.append(len(parts))
        largest.append(most)
        lengths.append(whole)
    counts = np.array(count, np.int64)
    first = np.cumsum(counts) - counts
    table = np.frombuffer(b"".join(entries), np.uint8).reshape(-1, STRETCH.size)
    return Packed(table, first, counts, np.array(largest, np.int64), lengths)


class PackedSums(LaunchedSums):
    """Some of them, by one launch of the kernel for as many as its parameters hold."""

    def __init__(self, kernels: Kernels, table: Packed, numbers: Sequence[int]) -> None:
        """Make ready what begins checksums by their numbers."""
        super().__init__([table.lengths[number] for number in numbers])
        self._kernels = kernels
        wanted = np.asarray(numbers, np.int64)
        count = table.counts[wanted]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        entries = table.entries[np.repeat(table.first[wanted], count) + within]
        which = np.repeat(np.arange(len(wanted), dtype="<u4"), count)
        entries[:, _WHICH] = which.view(np.uint8).reshape(-1, 4)
        self._told = entries.tobytes()
        self._most_words = int(table.words[wanted].max(initial=0))

    def add(self, parts: Sequence[Stretch]) -> None:
        """Nobody adds to them."""
        raise NotImplementedError("what is summed was told when it was packed")

    def begin(self) -> None:
        """Launch, and let what it finds come to the host."""
        if self._lengths:
            self._totals = self._kernels.sums(self._told, self._most_words, len(self._lengths))
