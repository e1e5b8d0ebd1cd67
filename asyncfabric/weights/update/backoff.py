"""Backoff: how long to rest before something that failed is tried again: longer each time, up to a bound. Pure."""

from __future__ import annotations

from asyncfabric.weights.update.messenger import AGAIN_S

MOST_S = 5.0
"""The longest rest: what was mended elsewhere is noticed after so long."""


class Backoff:
    """Rests that double from `AGAIN_S` to `MOST_S`."""

    def __init__(self) -> None:
        self._next_s = AGAIN_S

    def next_s(self) -> float:
        """Return the seconds to rest after one more failure."""
        rest, self._next_s = self._next_s, min(2 * self._next_s, MOST_S)
        return rest

    def reset(self) -> None:
        """Begin anew, after a success."""
        self._next_s = AGAIN_S
