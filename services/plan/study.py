"""One study: the plan of an update, and its prediction. Measures how long planning takes; everything else is pure."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncfabric.sim import Assumptions, Prediction, predict
from asyncfabric.sim.calibration import Calibration
from asyncfabric.sim.costs import COSTS, Hosts
from asyncfabric.sim.labour import labour_of
from asyncfabric.sim.workload import workload_of
from asyncfabric.weights.plan.assignment import imbalance
from asyncfabric.weights.plan.cards import ModelCard
from asyncfabric.weights.plan.layouts import moves_between
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.plan.planner import plan_weights
from asyncfabric.weights.plan.relay import Rates
from asyncfabric_services.plan.calibrated import calibration_summary
from asyncfabric_services.plan.layout import PlannedCluster
from asyncfabric_services.plan.published import Published, published_of
from asyncfabric_services.plan.runs import sent_runs

STEPS = 500
"""Steps of a prediction whose threads are busier than its rails, about."""


@dataclass(frozen=True)
class Calibrated:
    """What a calibration adds to a study: itself, the assumptions that it replaces, whose cores cost what."""

    calibration: Calibration
    measured: dict[str, Any]
    hosts: Hosts

    @property
    def used(self) -> tuple[str, ...]:
        """Costs that the prediction takes into account."""
        return tuple(name for name in COSTS if getattr(self.hosts.costs, name))


@dataclass(frozen=True)
class Study:
    """A plan, what it took, and what it would take.

    Attributes:
        plan_s, plan_cpu_s: wall and processor seconds from the model card to the finished plan.
        plan_peak_bytes: the most memory that the process had until the plan was finished.
    """

    card: ModelCard
    cluster: PlannedCluster
    plan: Plan
    prediction: Prediction
    plan_s: float
    plan_cpu_s: float
    plan_peak_bytes: int
    calibrated: Calibrated | None = None

    @property
    def published(self) -> Published | None:
        """What others published of an update of this shape."""
        return published_of(self.card, self.cluster)

    @property
    def error_bar(self) -> tuple[float, float] | None:
        """The predicted seconds, less and more the worst error of the calibration's runs that were not fitted."""
        if self.calibrated is None or not self.calibrated.calibration.held_out:
            return None
        seconds, error = self.prediction.predicted_s, self.calibrated.calibration.worst_error
        return seconds * max(0.0, 1 - error), seconds * (1 + error)

    def summary(self) -> dict[str, Any]:
        """Return plain values; those that scripts rely on are named in the reference of the command."""
        received = [self.plan.bytes_received(one.name)[0] for one in self.plan.replicas]
        balance = max(imbalance(each) for each in received)
        return {
            **self.prediction.summary(),
            "predicted_range": None if self.error_bar is None else [round(one, 4) for one in self.error_bar],
            "plan_seconds": round(self.plan_s, 3),
            "plan_cpu_seconds": round(self.plan_cpu_s, 3),
            "plan_peak_bytes": self.plan_peak_bytes,
            "sender_imbalance": round(imbalance(self.plan.bytes_sent()), 4),
            "receiver_imbalance": round(balance, 4),
            "model": self.card.name,
            "model_source": self.card.source,
            "model_bytes": self.plan.model_bytes,
            "trainer": msgspec.to_builtins(self.cluster.trainer),
            "replica": msgspec.to_builtins(self.cluster.replica),
            "replicas": self.cluster.replicas,
            "rows": self.plan.rows,
            "calibration": None
            if self.calibrated is None
            else calibration_summary(self.calibrated.calibration, self.calibrated.measured),
            "published": None if self.published is None else self.published.summary(),
            "relay": {"node_ranks": self.plan.relay.node_ranks, "width": self.plan.relay.width},
        }


def study(
    card: ModelCard, cluster: PlannedCluster, assumed: Assumptions, *, relay: bool, calibrated: Calibrated | None = None
) -> Study:
    """Plan and predict; raises ValueError when the layouts do not fit the model."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    moves = moves_between(card, cluster.trainer, cluster.replica)
    rates = Rates(
        rail_gbytes_per_s=assumed.rail_bytes_per_s / 1e9,
        node_gbytes_per_s=assumed.node_gbytes_per_s,
        node_ranks=min(assumed.node_ranks, cluster.replica.ranks),
    )
    plan = plan_weights(
        moves,
        trainers=cluster.trainer.ranks,
        receivers=cluster.replica.ranks,
        replicas=[f"replica {number}" for number in range(cluster.replicas)],
        relay=rates if relay else None,
    )
    took, took_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if calibrated is None:
        return Study(card, cluster, plan, predict(plan, assumed), took, took_cpu, peak)
    sent = sent_runs(plan)
    slowest_s = labour_of(plan, workload_of(plan, assumed), sent).longest_s(calibrated.hosts.costs)
    step_s = max(assumed.step_s, slowest_s / max(1.0, calibrated.hosts.cores) / STEPS)
    assumed = msgspec.structs.replace(assumed, step_s=step_s)
    found = predict(plan, assumed, calibrated.hosts, sent)
    return Study(card, cluster, plan, found, took, took_cpu, peak, calibrated)
