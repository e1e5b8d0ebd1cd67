"""Deadlines of calls that block: seconds from the call, None for none.

Pure functions, any thread.
"""

from __future__ import annotations

from time import monotonic

LONGEST_S = 1e9


def until(deadline: float | None) -> float | None:
    """Return the moment of a deadline on the monotonic clock.

    Raises:
        TypeError: no number.
        ValueError: negative, no number, or more than 1e9 seconds.
    """
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)):
        raise TypeError(f"deadline must be seconds or None, got {type(deadline).__name__} {deadline!r}")
    if not 0 <= deadline <= LONGEST_S:
        raise ValueError(f"deadline must be in 0..1e9 seconds, got {deadline!r}")
    return monotonic() + deadline
