"""What a simulation found: the seconds, where they went, and when each rank did what. Values and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.sim.assumptions import Assumptions

Lane = Literal["bring", "convert", "write", "receive", "forward"]
TRAINER_LANES: tuple[Lane, ...] = ("bring", "convert", "write")
RECEIVER_LANES: tuple[Lane, ...] = ("receive", "forward")


class Stage(msgspec.Struct, frozen=True):
    """One stage over all ranks that do it: busy seconds, mean and of the busiest one, and when the last one ended."""

    busy_mean_s: float
    busy_max_s: float
    last_end_s: float


class PredictedSpan(NamedTuple):
    """A time in which one rank was busy with one stage."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Prediction:
    """A simulated update.

    Attributes:
        predicted_s: from the first announcement to the decision that all replicas have the new version.
        floor_s: nobody can be faster at the rail's nominal rate: one copy of the model, spread perfectly over the ports
            of a replica; or all copies over those of the trainers, unless replicas feed each other.
        placement_floor_s: what the busiest port needs at the nominal rate for the bytes that this plan gives it.
        peak_scratch_bytes: the most that any trainer had brought or converted and not written.
        activity: for each lane a matrix (steps, ranks): which part of the step the rank was busy.
        assumed: the assumptions.
    """

    predicted_s: float
    floor_s: float
    placement_floor_s: float
    peak_scratch_bytes: int
    activity: dict[Lane, NDArray[np.float32]]
    assumed: Assumptions

    def stages(self) -> dict[str, Stage]:
        """Return the stages in their order."""
        found = {}
        step = self.assumed.step_s
        for lane, busy in self.activity.items():
            seconds = busy.sum(axis=0) * step
            ends = np.flatnonzero(busy.any(axis=1))
            last = float(ends[-1] + 1) * step if len(ends) else 0.0
            found[str(lane)] = Stage(float(seconds.mean()), float(seconds.max(initial=0.0)), last)
        return found

    def spans(self, lane: Lane, rank: int) -> list[PredictedSpan]:
        """Return when a rank was busy with a stage; pauses shorter than a step are not seen."""
        busy = np.concatenate([[False], self.activity[lane][:, rank] > 0, [False]])
        edges = np.flatnonzero(np.diff(busy.astype(np.int8)))
        step = self.assumed.step_s
        return [PredictedSpan(float(begin) * step, float(end) * step) for begin, end in edges.reshape(-1, 2)]

    def summary(self) -> dict[str, Any]:
        """Return plain values: seconds, stages, assumptions."""
        return {
            "predicted_seconds": round(self.predicted_s, 4),
            "floor_seconds": round(self.floor_s, 4),
            "placement_floor_seconds": round(self.placement_floor_s, 4),
            "peak_scratch_bytes": self.peak_scratch_bytes,
            "stages": {name: msgspec.to_builtins(stage) for name, stage in self.stages().items()},
            "assumptions": msgspec.to_builtins(self.assumed),
        }
