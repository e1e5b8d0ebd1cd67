"""Staging: the memory that converted weights wait in until they are written; one region, registered once, as a ring.

Runs on the event loop's thread. Places are taken one behind the other, and are free for others once those that were
taken before are given back too; who finds no room waits. Its length is the hard bound: nothing is staged elsewhere.
"""

from __future__ import annotations

from collections import deque

from asyncfabric import Region
from asyncfabric._notice import Notice

PLACE_ALIGN = 64


def padded(length_bytes: int) -> int:
    """Return the bytes that something takes in the staging memory."""
    return -(-length_bytes // PLACE_ALIGN) * PLACE_ALIGN


class Staging:
    """A ring over a region.

    Attributes:
        region: where the places are.
        highest_bytes: the most that was taken at once.
    """

    def __init__(self, region: Region) -> None:
        """Take the whole region."""
        self.region: Region = region
        self.highest_bytes: int = 0
        self._places: deque[tuple[int, int]] = deque()  # (begin, end) in order, none of them empty
        self._given: set[int] = set()  # where those begin that are back before earlier ones
        self._freed = Notice()

    @property
    def taken_bytes(self) -> int:
        """What is taken now."""
        return sum(end - begin for begin, end in self._places)

    async def take(self, length_bytes: int) -> int:
        """Return where `length_bytes` may be staged, once there is room.

        Raises ValueError for more than the region has.

        Cancellation: nothing was taken.
        """
        length = padded(length_bytes)
        if length > self.region.length:
            raise ValueError(f"{length_bytes} bytes cannot be staged in {self.region.length}: give more scratch_bytes")
        while (at := self._room(length)) is None:
            await self._freed.wait()
        self._places.append((at, at + length))
        self.highest_bytes = max(self.highest_bytes, self.taken_bytes)
        return at

    def give_back(self, at: int) -> None:
        """Give back the place that begins there."""
        self._given.add(at)
        while self._places and self._places[0][0] in self._given:
            self._given.remove(self._places.popleft()[0])
            self._freed.tell()

    def clear(self) -> None:
        """Give back everything; nothing reads or writes it any more."""
        while self._places:
            self.give_back(self._places[0][0])

    def _room(self, length: int) -> int | None:
        if not self._places:
            return 0
        first, last = self._places[0][0], self._places[-1][1]
        if last > first:
            if last + length <= self.region.length:
                return last
            return 0 if length <= first else None
        return last if last + length <= first else None
