"""asyncfabric.sim: what a cluster that nobody here owns would do, from real plans and named numbers. A public door."""

from asyncfabric.sim.assumptions import Assumptions
from asyncfabric.sim.calibration import Calibration, Judged, Run, expect, fit, judge
from asyncfabric.sim.clock import VirtualClock
from asyncfabric.sim.costs import HostCosts, Hosts
from asyncfabric.sim.fanout import predict
from asyncfabric.sim.moe import MoePrediction, predict_moe
from asyncfabric.sim.moe_assumptions import MoeAssumptions
from asyncfabric.sim.prediction import Prediction, Stage
from asyncfabric.sim.workload import Workload, workload_of

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
