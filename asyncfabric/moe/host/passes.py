"""Passes: how rows of many senders go through one bounded area of a receiver, as pure functions.

Every sender and the receiver know all the counts, so each works out the same plan. The rows of all senders stand in
one queue, the receiver's own first and then those of the members after it, round the circle: senders then begin with
different receivers. Each pass carries as many of them as the area has room for: one contiguous write of each sender.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from asyncfabric.moe.host.routing import Ints


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


class PassPlan:
    """The passes of one receiver, for known counts of rows from each sender."""

    def __init__(self, counts: Ints, receiver: int, room: int) -> None:
        """Plan rows `counts[sender]` for an area of `room` rows; raises ValueError when rows have no room at all."""
        members = len(counts)
        self._order = circle(receiver, members)
        listed = counts.tolist()
        self._begins: list[int] = [0, *accumulate(listed[receiver:] + listed[:receiver])]
        self._receiver = receiver
        self._room = room
        self.rows: int = self._begins[-1]
        if self.rows and room < 1:
            raise ValueError(f"{self.rows} rows, but the area has no room for any")
        self.passes: int = -(-self.rows // room) if self.rows else 0

    def segment(self, sender: int, number: int) -> Segment:
        """Return the rows that a sender sends in one pass."""
        place = (sender - self._receiver) % len(self._order)
        start, stop = self._begins[place], self._begins[place + 1]
        low, high = max(start, number * self._room), min(stop, (number + 1) * self._room)
        if high <= low:
            return NOTHING
        return Segment(low - start, high - start, low - number * self._room)

    def senders(self, number: int) -> list[int]:
        """Return who sends rows in a pass, in the order of their rows."""
        return [sender for sender in self._order if self.segment(sender, number).rows]
