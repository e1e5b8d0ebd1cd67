"""Trace points of a fake engine: the newest events, as the native ring keeps them. Under the lock of the network."""

from __future__ import annotations

import time
from collections import deque
from typing import get_args

from asyncfabric.types import TraceWhat

KEPT = 4096
_NUMBERS: dict[TraceWhat, int] = {what: number for number, what in enumerate(get_args(TraceWhat))}


class TraceRing:
    """Events while it is on."""

    def __init__(self) -> None:
        self.on: bool = False
        self.events: deque[tuple[int, int, int, int]] = deque(maxlen=KEPT)

    def point(self, what: TraceWhat, subject: int, value: int) -> None:
        """Keep an event, if tracing is on."""
        if self.on:
            self.events.append((time.monotonic_ns(), _NUMBERS[what], subject, value))
