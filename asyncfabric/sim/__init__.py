"""asyncfabric.sim: what a cluster that nobody here owns would do, from real plans and named numbers. A public door.

What predicts a mixture of experts speaks of torch's element types, so it is imported when it is asked for: the rest
needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfabric.sim.assumptions import Assumptions
from asyncfabric.sim.calibration import Calibration, Judged, Run, expect, fit, judge
from asyncfabric.sim.clock import VirtualClock
from asyncfabric.sim.costs import HostCosts, Hosts
from asyncfabric.sim.fanout import predict
from asyncfabric.sim.moe_assumptions import MoeAssumptions
from asyncfabric.sim.prediction import Prediction, Stage
from asyncfabric.sim.workload import Workload, workload_of

if TYPE_CHECKING:
    from asyncfabric.sim.moe import MoePrediction, predict_moe

__all__ = [
    "Assumptions",
    "Calibration",
    "HostCosts",
    "Hosts",
    "Judged",
    "MoeAssumptions",
    "MoePrediction",
    "Prediction",
    "Run",
    "Stage",
    "VirtualClock",
    "Workload",
    "expect",
    "fit",
    "judge",
    "predict",
    "predict_moe",
    "workload_of",
]


def __getattr__(name: str) -> Any:
    if name not in ("MoePrediction", "predict_moe"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asyncfabric.sim import moe

    return getattr(moe, name)
