"""Passes: how rows of many senders go through one bounded area of a receiver, as pure functions.

Every sender and the receiver know all the counts, so each works out the same plan. The rows of all senders stand in
one queue, the receiver's own first and then those of the members after it, round the circle: senders then begin with
different receivers. Each pass carries as many of them as the area has room for: one contiguous write of each sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Rows [begin, end) of one sender, which lie in the area from row `at` on."""

    begin: int
    end: int
    at: int

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.end - self.begin


NOTHING = Segment(0, 0, 0)


def circle(first: int, members: int) -> list[int]:
    """Return the members from `first` on, round the circle."""
    return [(first + step) % members for step in range(members)]


def rows_before(counts: Sequence[int], receiver: int, sender: int) -> int:
    """Return how many rows stand before those of a sender in the receiver's queue."""
    if sender >= receiver:
        return sum(counts[receiver:sender])
    return sum(counts[receiver:]) + sum(counts[:sender])


class PassPlan:
    """The passes of one receiver, for known counts of rows from each sender."""

    def __init__(self, counts: Sequence[int], receiver: int, room: int) -> None:
        """Plan rows `counts[sender]` for an area of `room` rows; raises ValueError when rows have no room at all."""
        self._counts = counts
        self._receiver = receiver
        self._room = room
        self.rows: int = sum(counts)
        if self.rows and room < 1:
            raise ValueError(f"{self.rows} rows, but the area has no room for any")
        self.passes: int = -(-self.rows // room) if self.rows else 0

    def segment(self, sender: int, number: int) -> Segment:
        """Return the rows that a sender sends in one pass."""
        start = rows_before(self._counts, self._receiver, sender)
        stop, begin = start + self._counts[sender], number * self._room
        low, high = max(start, begin), min(stop, begin + self._room)
        if high <= low:
            return NOTHING
        return Segment(low - start, high - start, low - begin)

    def senders(self, number: int) -> list[int]:
        """Return who sends rows in a pass, in the order of their rows."""
        order = circle(self._receiver, len(self._counts))
        if self.passes == 1:
            return [sender for sender in order if self._counts[sender]]
        return [sender for sender in order if self.segment(sender, number).rows]
