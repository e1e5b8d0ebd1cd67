"""Pace: how often who hears many wakes up to hear them; what is said meanwhile is heard together.

Waking up costs an event loop more than hearing a word. A few who say something now and then are heard at once,
hundreds who talk all the time are heard at a steady beat. Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import anyio

from asyncfabric.weights.update.threads import ways

Heard = TypeVar("Heard")

BEATS_PER_S = 250.0
"""Of a receiver, which has until the end of the update to check."""

QUICK_BEATS_PER_S = 1000.0
"""Of a coordinator, for whom everybody waits; and of a receiver with cores for it, whose few senders write for tens of
milliseconds: the last of what they say would wait for four of them."""

FEW_SENDERS = 16
"""So many do not talk all the time."""

BEATS_AT_ONCE = 16
"""So many times somebody may be heard without a rest after a silence."""


IDLE_BEATS = 8
"""So many times in a row it is worth looking whether something was said, before waiting for it: who waits is woken by
every write that arrives, on rails that do not tell writes and words apart."""


def receiving_beats(senders: int) -> float:
    """Return how many beats a second a receiver has for so many senders."""
    return QUICK_BEATS_PER_S if senders <= FEW_SENDERS and ways() > 1 else BEATS_PER_S


class Pace:
    """A bucket of beats: one for each time that something was heard; it fills as time goes by.

    Attributes:
        beats_per_s: how fast.
    """

    def __init__(self, beats_per_s: float = BEATS_PER_S) -> None:
        """Begin with a full bucket."""
        self.beats_per_s: float = beats_per_s
        self._beats = float(BEATS_AT_ONCE)
        self._since = monotonic()

    async def listen(self, take_nowait: Callable[[], list[Heard]]) -> list[Heard]:
        """Take a beat, and return what was said when there was one: nothing, where waiting for it is better.

        Cancellation: only this wait ends; nothing is lost.
        """
        now = monotonic()
        self._beats = min(float(BEATS_AT_ONCE), self._beats + (now - self._since) * self.beats_per_s) - 1.0
        self._since = now
        if self._beats >= 0:
            return []
        await anyio.sleep(-self._beats / self.beats_per_s)
        for _ in range(IDLE_BEATS):
            if found := take_nowait():
                return found
            await anyio.sleep(1 / self.beats_per_s)
        return []
