"""Pace: how often a receiver wakes up to hear what was written; what is said meanwhile is heard together.

Waking up costs an event loop more than hearing a word. A few senders who say something now and then are heard at once,
hundreds who talk all the time are heard at a steady beat. Runs on the event loop's thread.
"""

from __future__ import annotations

from time import monotonic

import anyio

BEATS_PER_S = 250.0
BEATS_AT_ONCE = 16
"""So many times somebody may be heard without a rest after a silence."""


class Pace:
    """A bucket of beats: one for each time that something was heard; it fills as time goes by."""

    def __init__(self) -> None:
        self._beats = float(BEATS_AT_ONCE)
        self._since = monotonic()

    async def rest(self) -> None:
        """Take a beat, and return when there was one.

        Cancellation: only this wait ends.
        """
        now = monotonic()
        self._beats = min(float(BEATS_AT_ONCE), self._beats + (now - self._since) * BEATS_PER_S) - 1.0
        self._since = now
        if self._beats < 0:
            await anyio.sleep(-self._beats / BEATS_PER_S)
