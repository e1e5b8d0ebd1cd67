"""Checksums on a GPU: `word_sum` by compiled kernels or by torch, XXH3 of bytes that are brought; packed launches.

Runs on the thread that launches; results are waited for on any thread. Packed sums describe the stretches of all rows
to the GPU once, and a launch names rows by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncfabric.weights.memory.checksums import FIRST, OFFSET, SECOND, ChecksumKind, checksum, finished
from asyncfabric.weights.memory.device import Stretch
from asyncfabric.weights.memory.gpu.kernels import OUTER, STRETCH, Brought, WeightKernels
from asyncfabric.weights.memory.rows import Strided
from asyncfabric.weights.plan.boxes import Ints

STEP_WORDS = 1 << 20

MASK32 = (1 << 32) - 1

Gathered = Callable[[Stretch], Tensor]
"""Returns the bytes of a stretch in order: a view when they lie in one run, else a copy."""


class TorchSums:
    """Checksums of the kind "words", by torch."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered
        self._noted: list[Sequence[Stretch]] = []
        self._totals: list[Tensor] = []
        self._lengths: list[int] = []

    def add(self, parts: Sequence[Stretch]) -> None:
        """Note one."""
        self._noted.append(parts)

    def _begin(self, parts: Sequence[Stretch]) -> None:
        totals, length, place = [], 0, 0
        for part in parts:
            ordered = self._gathered(part)
            totals.append(_total(ordered, place))
            length += ordered.numel()
            place += -(-ordered.numel() // 4)
        self._totals.append(torch.stack(totals).sum())
        self._lengths.append(length)

    def begin(self) -> None:
        """Begin all that were not begun."""
        noted, self._noted = self._noted, []
        for parts in noted:
            self._begin(parts)

    def ready(self) -> bool:
        """Only torch knows."""
        return True

    def result(self) -> list[int]:
        """Wait for them."""
        self.begin()
        if not self._totals:
            return []
        totals = torch.stack(self._totals).tolist()
        return [finished(total, length) for total, length in zip(totals, self._lengths, strict=True)]


class LaunchedSums:
    """Checksums of the kind "words" by one launch of a kernel, which `begin` of those who derive from it makes."""

    def __init__(self, lengths: list[int]) -> None:
        """Await one for each of these lengths, in bytes; more may be added before it begins."""
        self._lengths = lengths
        self._totals: Brought | None = None

    def begin(self) -> None:
        """Launch, and let what it finds come to the host."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether they are here."""
        return self._totals is None or self._totals.ready()

    def result(self) -> list[int]:
        """Wait for them."""
        if self._totals is None:
            self.begin()
        if self._totals is None:
            return []
        return [finished(total, length) for total, length in zip(self._totals.wait(), self._lengths, strict=True)]


class KernelSums(LaunchedSums):
    """Checksums that are added one by one."""

    def __init__(self, kernels: WeightKernels, gathered: Gathered) -> None:
        super().__init__([])
        self._kernels = kernels
        self._gathered = gathered
        self._stretches: list[bytes] = []
        self._most_words = 0
        self._kept: list[Tensor] = []

    def add(self, parts: Sequence[Stretch]) -> None:
        """Note one."""
        place = whole = 0
        for memory, lies, at in parts:
            length, address, kept = lies.nbytes, memory.data_ptr() + at, memory
            reported = lies_for_kernel(lies, address % 16)
            if reported is None:
                kept = self._gathered(Stretch(memory, lies, at))
                kept = kept if kept.data_ptr() % 4 == 0 else kept.clone()
                address = kept.data_ptr()
                reported = _in_one_run(length, address % 16)
            strides, sizes, run_words, vector = reported
            words, tail = divmod(length, 4)
            self._kept.append(kept)
            self._stretches.append(
                STRETCH.pack(address, words, place, *strides, *sizes, run_words, len(self._lengths), tail, vector)
            )
            self._most_words = max(self._most_words, words)
            place += -(-length // 4)
            whole += length
        self._lengths.append(whole)

    def begin(self) -> None:
        """Launch, and let what it finds come to the host."""
        if self._lengths:
            self._totals = self._kernels.sums(b"".join(self._stretches), self._most_words, len(self._lengths))

    def result(self) -> list[int]:
        """Wait for them."""
        found = super().result()
        self._kept.clear()
        return found


Lies = tuple[tuple[int, ...], tuple[int, ...], int, bool]
"""Strides and sizes from run to run, innermost first, words of a run, whether four words can be loaded at once."""


def _in_one_run(length: int, past: int) -> Lies:
    return (0,) * OUTER, (1,) * OUTER, length // 4, past == 0 and length % 16 < 4


@lru_cache(maxsize=1 << 15)
def lies_for_kernel(lies: Strided, past: int) -> Lies | None:
    """Return how a stretch lies as the kernel wants it; None for what it cannot read word by word.

    `past` is how far it begins behind a multiple of 16. Shapes are few, and are values that do not change.
    """
    run = lies.run_bytes
    if past % 4:
        return None
    if run == lies.nbytes:
        return _in_one_run(run, past)
    outer = lies.outer_dimensions(run)
    strides, sizes = lies.strides[:outer][::-1], lies.sizes[:outer][::-1]
    if outer > OUTER or any(step % 4 for step in (run, *strides)):
        return None
    vector = not any(number % 16 for number in (past, run, *strides))
    more = OUTER - outer
    return strides + (0,) * more, sizes + (1,) * more, run // 4, vector


class BroughtSums:
    """Checksums of another kind, for a sender that knows no other: the bytes come to the host."""

    def __init__(self, gathered: Gathered, kind: ChecksumKind) -> None:
        self._gathered = gathered
        self._kind: ChecksumKind = kind
        self._noted: list[Sequence[Stretch]] = []
        self._found: list[int] = []

    def add(self, parts: Sequence[Stretch]) -> None:
        """Note one."""
        self._noted.append(parts)

    def begin(self) -> None:
        """Work out all that were not."""
        noted, self._noted = self._noted, []
        for parts in noted:
            self._found.append(checksum([self._gathered(part).cpu().numpy() for part in parts], self._kind))

    def ready(self) -> bool:
        """They are."""
        return True

    def result(self) -> list[int]:
        """Return them."""
        self.begin()
        return self._found


def _total(ordered: Tensor, place: int) -> Tensor:
    """Return the sum of products of contiguous bytes whose first word has this place."""
    whole = ordered.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=ordered.device)
    tail = ordered[whole:]
    aligned = ordered[:whole] if ordered.data_ptr() % 4 == 0 else ordered[:whole].clone()
    for low in range(0, whole, 4 * STEP_WORDS):
        total += _products(aligned[low : low + 4 * STEP_WORDS].view(torch.int32), place + low // 4)
    if tail.numel():
        last = torch.zeros(4, dtype=torch.uint8, device=ordered.device)
        last[: tail.numel()] = tail
        total += _products(last.view(torch.int32), place + whole // 4)
    return total


def _products(words: Tensor, place: int) -> Tensor:
    factors = torch.arange(place + OFFSET, place + OFFSET + words.numel(), dtype=torch.int64, device=words.device)
    factors = (factors * FIRST) & MASK32  # below 2**63 + a wrap: the low half is right either way
    factors = factors ^ (factors >> 15)
    factors = (factors * SECOND) & MASK32
    factors = (factors ^ (factors >> 16)) * 2 + 1
    mixed = ((words.to(torch.int64) + OFFSET) * FIRST) & MASK32
    mixed = mixed ^ (mixed >> 15)
    return (mixed * factors).sum()


_WHICH = slice(STRETCH.size - 12, STRETCH.size - 8)
"""Of a STRETCH, what is given anew each time: which checksum it is a part of."""


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
            reported = lies_for_kernel(lies, address % 16)
            if reported is None:
                return None
            strides, sizes, run_words, vector = reported
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

    def __init__(self, kernels: WeightKernels, table: Packed, numbers: Sequence[int]) -> None:
        """Make ready what begins checksums by their numbers."""
        super().__init__([table.lengths[number] for number in numbers])
        self._kernels = kernels
        wanted = np.asarray(numbers, np.int64)
        count = table.counts[wanted]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        entries = table.entries[np.repeat(table.first[wanted], count) + within]
        which = np.repeat(np.arange(len(wanted), dtype="<u4"), count)
        entries[:, _WHICH] = which.view(np.uint8).reshape(-1, 4)
        self._reported = entries.tobytes()
        self._most_words = int(table.words[wanted].max(initial=0))

    def add(self, parts: Sequence[Stretch]) -> None:
        """Nobody adds to them."""
        raise NotImplementedError("what is summed was given when it was packed")

    def begin(self) -> None:
        """Launch, and let what it finds come to the host."""
        if self._lengths:
            self._totals = self._kernels.sums(self._reported, self._most_words, len(self._lengths))
