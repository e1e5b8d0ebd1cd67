"""A clock that goes on only when it is moved: predictions are the same on every machine, however slow it is."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the start, counted in whole steps so that no rounding piles up.

    Attributes:
        step_s: length of one step.
        steps: steps gone by.
    """

    def __init__(self, step_s: float) -> None:
        """Start at 0; raises ValueError for a step that is not above 0."""
        if step_s <= 0:
            raise ValueError(f"a step must be longer than 0 s, got {step_s}")
        self.step_s = step_s
        self.steps: int = 0

    @property
    def now_s(self) -> float:
        """The time."""
        return self.steps * self.step_s

    def tick(self) -> None:
        """Go on by one step."""
        self.steps += 1
