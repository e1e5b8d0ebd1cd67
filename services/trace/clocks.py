"""How far the clocks of nodes are from ours, from questions and answers; and recordings laid on one clock. Pure.

A node read its clock at some moment between our question and its answer, so the middle of the two is wrong by at most
half of what lies between them (Cristian, 1989): the quickest of several answers is the one to believe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncfabric.observe.trace import Recording


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of `/clock`.

    Attributes:
        host: boot of the host that answered.
        sent_ns, came_ns: on our clock: before the question left, after the answer came.
        there_ns: on the clock of the node.
    """

    host: str
    sent_ns: int
    came_ns: int
    there_ns: int

    @property
    def offset_ns(self) -> int:
        """What the node's clock is ahead of ours."""
        return self.there_ns - (self.sent_ns + self.came_ns) // 2

    @property
    def error_ns(self) -> int:
        """How wrong `offset_ns` may be."""
        return (self.came_ns - self.sent_ns + 1) // 2


def best_of(readings: Iterable[Reading]) -> dict[str, Reading]:
    """Return the surest reading of each host."""
    best: dict[str, Reading] = {}
    for reading in readings:
        known = best.get(reading.host)
        if known is None or reading.error_ns < known.error_ns:
            best[reading.host] = reading
    return best


def on_one_clock(
    recordings: Sequence[Recording], best: Mapping[str, Reading], here: str, wall_offset_ns: int
) -> list[Recording]:
    """Return the recordings with the wall clock of this host, `wall_offset_ns` ahead of its monotonic one.

    Recordings of this host (`here`) need no correction, and those of a host that was not asked keep their own clock.
    """
    laid = []
    for recording in recordings:
        reading = best.get(recording.host)
        if recording.host == here:
            recording = msgspec.structs.replace(recording, wall_offset_ns=wall_offset_ns)
        elif reading is not None:
            offset_ns = wall_offset_ns - reading.offset_ns
            recording = msgspec.structs.replace(
                recording, wall_offset_ns=offset_ns, clock_error_ns=max(1, reading.error_ns)
            )
        laid.append(recording)
    return laid
