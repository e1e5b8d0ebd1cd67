"""What compiled routes and records take and give: numpy arrays. Types only, made by cython_ext/rows/records.pxi.

A front is the memory that a record ends in; fronts may be written by peers at any time. Arrays about rows have an entry
for each row: origins [rows], experts and weights [rows, top_k], scales [rows, scales]. All raise IndexError, before
anything is written, where an index points outside or sizes do not fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from asyncfabric._kernels.rows import Bytes, Experts, Floats, Ints


class RefusedHead(NamedTuple):
    """The head of a record that was refused.

    Attributes:
        foreign: it is no record of this member for this step; else it announces too many rows.
        member: whose front it is in.
        magic, sender, members, step, rows: the numbers that it has.
    """

    foreign: bool
    member: int
    magic: int
    sender: int
    members: int
    step: int
    rows: int


class RecordLoops(Protocol):
    """Routes of tokens, and the records about them; the GIL is released meanwhile."""

    def range_of(self, experts: Experts | Ints) -> tuple[int, int]:
        """Return the least and the largest number, also of experts in 8 bytes; (0, 0) where there is none."""

    def plan_route(self, experts: Experts, owner: Ints, tokens: Ints, offsets: Ints) -> int:
        """List the tokens of each member, one copy each, ascending; returns how many entries of `tokens` are used.

        `owner` has the member of each expert, -1 for none; the tokens of member m are offsets[m] .. offsets[m + 1] - 1.
        """

    def write_records(
        self,
        fronts: Sequence[Bytes],
        sender: int,
        step: int,
        origins: Experts,
        experts: Experts,
        weights: Floats,
        scales: Floats,
        owner: Ints,
        tokens: Ints,
        offsets: Ints,
    ) -> None:
        """Write the record for each member to the end of its front; experts of other members become -1."""

    def read_heads(
        self, fronts: Sequence[Bytes], reader: int, step: int, max_tokens: int, counts: Ints, offsets: Ints
    ) -> tuple[bool, int, int, int, int, int, int] | None:
        """Read the rows from each member to each, and where those for `reader` begin.

        Returns None, or what a RefusedHead has of the first record that is none.
        """

    def read_rows(
        self,
        fronts: Sequence[Bytes],
        offsets: Ints,
        origins: Experts,
        experts: Experts,
        weights: Floats,
        scales: Floats,
    ) -> None:
        """Copy what the rows of all members are about, in their order; offsets as `read_heads` made them."""
