"""Policy: which children a supervisor restarts after a failure, and when it gives up. Pure; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Strategy = Literal["one_for_one", "rest_for_one"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a supervisor does about a failed child.

    Attributes:
        strategy: `one_for_one` restarts the child that failed; `rest_for_one` also stops those that were spawned after
            it, the last first, and starts them again in order, since they may depend on it.
        restarts: how many failures it heals within `within_s` seconds; one more and it gives up: it stops its children
            and fails itself, so that its own supervisor decides. 0 heals nothing.
        within_s: seconds over which failures are counted.
    """

    strategy: Strategy = "one_for_one"
    restarts: int = 0
    within_s: float = 5.0

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy is one of {get_args(Strategy)}, got {self.strategy!r}")
        if self.restarts < 0 or not self.within_s > 0:
            raise ValueError(f"restarts >= 0 and within_s > 0 are needed, got {self.restarts} and {self.within_s}")
