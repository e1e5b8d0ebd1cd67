"""What the compiled row loops take and give: numpy arrays, written in place. Types only, made by cython_ext/rows.pxi.

Rows are bytes, shape [rows, row_bytes], of an array or where they lie (`rows_at`); `kind` states what elements they
have: 0 bfloat16, 1 float16, 2 float32. All raise IndexError, before anything is written, where an index points outside
or sizes do not fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Experts = NDArray[np.int32]
Span = tuple[int, int]
"""Rows begin .. end - 1 of a step: mostly those of one member. One call serves all members."""
Part = tuple[int, int, int]
"""(begin, end, at): row `at + i` of a source is for token `tokens[begin + i]`."""


class RowMemory(Protocol):
    """Rows where they lie, in memory that its owner keeps: cheaper to make and to take than an array."""

    def __len__(self) -> int:
        """Return how many rows there are."""


RowBytes = Bytes | RowMemory


class RowLoops(Protocol):
    """Moving and adding up rows; the GIL is released meanwhile."""

    def rows_at(self, address: int, count: int, row_bytes: int, owner: object) -> RowMemory:
        """Return rows that lie at an address as long as the owner lives, which they keep."""

    def take_rows(self, source: RowBytes, index: Ints, spans: Sequence[Span], targets: Sequence[RowBytes]) -> None:
        """Make the first rows of each target the rows index[begin:end] of the source, (begin, end) being its span."""

    def spread_rows(
        self,
        spans: Sequence[Span],
        sources: Sequence[RowBytes],
        picked: Sequence[Ints | None],
        pair_offsets: Ints,
        position: Ints,
        target: RowBytes,
    ) -> None:
        """Copy each row of the spans to the rows position[pair_offsets[row]:pair_offsets[row + 1]] of the target.

        The rows of a span are the first of its source; where it has an array of picked rows, those.
        """

    def weigh_rows(
        self,
        source: RowBytes,
        kind: int,
        pair_offsets: Ints,
        position: Ints,
        weights: Floats,
        spans: Sequence[Span],
        targets: Sequence[RowBytes],
    ) -> None:
        """Make each row of the spans the fp32 sum of weights[p] * source[position[p]] over its pairs p, rounded once.

        The sums of a span go to the first rows of its target.
        """

    def add_rows(self, source: RowBytes, kind: int, tokens: Ints, parts: Sequence[Part], target: RowBytes) -> None:
        """Make row t of the target the fp32 sum of the rows that the parts have for token t, rounded once.

        The tokens of a part ascend.
        """

    def gather_sums(self, source: RowBytes, kind: int, tokens: Ints, parts: Sequence[Part], sums: Floats) -> None:
        """Add the same to row t of fp32 sums."""

    def count_pairs(
        self, experts: Experts, first: int, alignment: int, counts: Ints, begins: Ints, pair_offsets: Ints
    ) -> int:
        """Count the pairs of rows and experts first .. first + len(counts) - 1; returns how many there are.

        Fills the rows of each expert, where those of each begin and the last end, and where each row's pairs begin.
        """

    def place_pairs(
        self,
        experts: Experts,
        weights: Floats,
        first: int,
        begins: Ints,
        position: Ints,
        pair_weights: Floats,
        row_of: Ints,
        choice_of: Ints,
    ) -> None:
        """Give each pair its output row and its weight; those of expert e begin at begins[e]. -1 is of padding."""

    def sums_kind(self) -> str:
        """Return which instructions the sums use: avx512, avx2 or plain."""
