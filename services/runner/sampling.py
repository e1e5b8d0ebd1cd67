"""How a request wants its tokens chosen. No torch here: routers read it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen.

    Attributes:
        temperature: 0 takes the largest logit (of equal ones the lowest token id); above, logits are divided by it.
        top_p: tokens are drawn from the smallest set of most likely ones that holds this share, in (0, 1].
        seed: of this request's draws; two requests with one seed and one prompt get one answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be in 0..2, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
