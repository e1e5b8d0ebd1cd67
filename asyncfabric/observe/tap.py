"""A tap on a fabric's trace: takes its newest events again and again, so that a recording is longer than the ring.

On the event loop's thread. The engine keeps 4,096 events and reports only what they are; what was taken before is
recognized by its time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from asyncfabric.types import TraceEvent

KEPT = 65536


class TraceTap:
    """Collects the events of a fabric from now on: `TraceTap(fabric.take_trace)`, while its trace is on.

    Attributes:
        events: those that came, the newest `most`, the oldest first.
        gaps: how often events were overwritten before they were taken.
    """

    def __init__(self, take: Callable[[], Sequence[TraceEvent]], since_ns: int | None = None, most: int = KEPT) -> None:
        """Begin; `take` returns the newest events, the oldest first. Those before `since_ns` (now) are left out."""
        self.events: deque[TraceEvent] = deque(maxlen=most)
        self.gaps: int = 0
        self._take = take
        self._last_ns: int = time.monotonic_ns() if since_ns is None else since_ns
        self._at_last: int = 0  # events taken that have this very time
        self._began: bool = False

    def drain(self) -> None:
        """Take what came since the last drain; call it more often than 4,096 events need."""
        seen = self._take()
        if self._began and seen and min(event.time_ns for event in seen) > self._last_ns:
            self.gaps += 1
        skip = self._at_last
        for event in seen:
            if event.time_ns < self._last_ns:
                continue
            if event.time_ns == self._last_ns and skip:
                skip -= 1
                continue
            self.events.append(event)
            self._began = True
        if self.events and self.events[-1].time_ns >= self._last_ns:
            self._last_ns = self.events[-1].time_ns
            self._at_last = sum(event.time_ns == self._last_ns for event in seen)
