"""asyncfabric.sim: what a cluster that nobody here owns would do, from real plans and named numbers. A public door."""

from asyncfabric.sim.assumptions import Assumptions
from asyncfabric.sim.clock import VirtualClock
from asyncfabric.sim.fanout import predict
from asyncfabric.sim.prediction import Prediction, Stage
from asyncfabric.sim.workload import Workload, workload_of

__all__ = ["Assumptions", "Prediction", "Stage", "VirtualClock", "Workload", "predict", "workload_of"]
