"""A tap on a fabric's trace: takes its newest events again and again, so that a recording is longer than the ring.

On the event loop's thread. The engine keeps 4,096 events and says only what they are; what was taken before is told
by its time.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from asyncfabric.types import TraceEvent

if TYPE_CHECKING:
    from asyncfabric._api.fabric import Fabric

KEPT = 65536


class TraceTap:
    """Collects the events of a fabric from now on; switch its trace on before, and off afterwards.

    Attributes:
        events: those that came, the newest `most`, the oldest first.
        gaps: how often events were overwritten before they were taken.
    """

    def __init__(self, fabric: Fabric, most: int = KEPT) -> None:
        """Begin; older events of the fabric are left out."""
        self.events: deque[TraceEvent] = deque(maxlen=most)
        self.gaps: int = 0
        self._fabric = fabric
        self._last_ns = time.monotonic_ns()
        self._at_last = 0  # events taken that have this very time
        self._began = False

    def drain(self) -> None:
        """Take what came since the last drain; call it more often than 4,096 events need."""
        seen = self._fabric.take_trace()
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
