"""The update of all replicas on a virtual clock: bring, convert, write, forward, in steps of equal length.

A fluid model: within a step every stage moves as many bytes as its rate, its input and the scratch watermark allow.
Input of a stage is what the one before had finished when the step began, so a unit needs at least one step for each
stage. Where cores are given, every stage has a thread that needs them (`Processor`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncfabric.sim.assumptions import Assumptions
from asyncfabric.sim.clock import VirtualClock
from asyncfabric.sim.costs import Hosts
from asyncfabric.sim.labour import SentRuns, labour_of
from asyncfabric.sim.prediction import Lane, Prediction
from asyncfabric.sim.processor import Processor
from asyncfabric.sim.rails import share
from asyncfabric.sim.workload import Floats, Workload, workload_of
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan

DONE = 1.0
"""Bytes that may be left over by rounding."""


def predict(
    plan: Plan, assumed: Assumptions | None = None, hosts: Hosts | None = None, sent: SentRuns | None = None
) -> Prediction:
    """Return what an update by this plan would take.

    Args:
        plan: with its replicas.
        assumed: what is taken for granted.
        hosts: whose cores the code needs, at which cost; None: everything is done by devices.
        sent: as senders carry the pieces out, for what that costs on hosts.

    Raises:
        ValueError: the plan has no replica.
        RuntimeError: nothing moves any more and the update is not complete.
    """
    assumed = assumed or Assumptions()
    work = workload_of(plan, assumed)
    processor = None
    if hosts is not None:
        processor = Processor(hosts, work, labour_of(plan, work, sent), assumed.step_s)
    clock = VirtualClock(assumed.step_s)
    trainers, receivers = _Trainers(work, assumed, processor), _Receivers(work, assumed, processor)
    history: list[list[NDArray[np.float32]]] = []
    idle = 0
    while not (trainers.done and receivers.done):
        bring, convert, write = trainers.step(clock.now_s, receivers)
        forward = receivers.step()
        busy = (bring, convert, write, receivers.busy, forward)
        history.append([each.astype(np.float32) for each in busy])
        moves = any(each.any() for each in busy) or receivers.verifies
        idle = 0 if moves or clock.now_s < assumed.skew_s else idle + 1
        if idle > len(plan.replicas) + 2:
            raise RuntimeError(
                f"nothing moves at {clock.now_s:.3f} s, {receivers.missing:.0f} bytes are missing: "
                "somebody is fed in a circle, or one box is larger than the scratch"
            )
        clock.tick()
    lanes: tuple[Lane, ...] = ("bring", "convert", "write", "receive", "forward")
    activity = {lane: np.stack([step[number] for step in history]) for number, lane in enumerate(lanes)}
    tail_s = assumed.unit_bytes / (assumed.verify_gbytes_per_s * 1e9)
    if processor is not None:
        tail_s += processor.coordinator_s + processor.open_s + processor.tail_s
    end_s = clock.now_s + tail_s + assumed.commit_s
    return Prediction(end_s, *_floors(plan, assumed), int(trainers.peak), activity, assumed)


def _floors(plan: Plan, assumed: Assumptions) -> tuple[float, float]:
    nominal = assumed.rail_gbits_per_s / 8 * 1e9
    directly = sum(one.parent is None for one in plan.replicas)
    floor = max(plan.model_bytes / plan.receivers, plan.model_bytes * directly / plan.trainers)
    busiest = max(int(plan.bytes_sent().max()), *(int(plan.bytes_received(one.name)[0].max()) for one in plan.replicas))
    return floor / nominal, busiest / nominal


@dataclass(eq=False)
class _Receivers:
    """All replicas: what came over rails, what of it was checked, what is forwarded inside nodes and to others."""

    work: Workload
    assumed: Assumptions
    processor: Processor | None

    def __post_init__(self) -> None:
        self.got = np.zeros(len(self.work.fed))
        self.passed = np.zeros(len(self.work.fed))
        self.chained = np.flatnonzero(self.work.feeder >= 0)
        self.capacity = self.assumed.rail_bytes_per_s * self.assumed.step_s
        self.busy: Floats = np.zeros(len(self.work.fed))
        self.checked = np.zeros(len(self.work.fed))
        self.to_check: Floats = self.work.fed + self.work.gets
        self.checks = np.full(len(self.work.fed), self.assumed.verify_gbytes_per_s * 1e9 * self.assumed.step_s)
        self.ports = np.full(len(self.work.fed), self.capacity)
        self.ports[self.chained] = 0.0
        if self.processor is not None:
            self.checks = np.minimum(
                self.checks,
                np.minimum(self.processor.most(self.processor.reported), self.processor.most(self.processor.verify)),
            )
            self.ports = np.minimum(self.ports, self.processor.most(self.processor.receive))
        self.verifies = True

    @property
    def missing(self) -> float:
        return float((self.work.fed - self.got).sum() + (self.work.forwards - self.passed).sum())

    @property
    def done(self) -> bool:
        return bool(
            (self.work.fed - self.got < DONE).all()
            and (self.work.forwards - self.passed < DONE).all()
            and (self.to_check - self.checked < DONE).all()
        )

    @property
    def checkable(self) -> Floats:
        """Bytes that each could check in a step: what is there, as fast as it goes."""
        part = np.where(self.work.fed > 0, self.got / np.maximum(self.work.fed, 1.0), 1.0)
        return np.clip(part * self.to_check - self.checked, 0.0, self.checks)

    def check(self, amounts: Floats) -> None:
        """Check a step's bytes."""
        self.checked += amounts
        self.verifies = bool(amounts.any())

    def take(self, amounts: Floats) -> None:
        """Take a step's bytes from trainers."""
        self.busy = amounts / self.capacity
        self.got += amounts

    def step(self) -> Floats:
        """Forward what had arrived; return how busy each port inside a node was."""
        part = self.got / np.maximum(self.work.fed, 1.0)
        if len(self.chained):
            ready = part[self.work.feeder[self.chained]] * self.work.fed[self.chained] - self.got[self.chained]
            amount = np.clip(ready, 0.0, self.capacity)
            self.got[self.chained] += amount
            self.busy[self.chained] += amount / self.capacity
        rate = self.assumed.node_gbytes_per_s * 1e9 * self.assumed.step_s
        amount = np.clip(part * self.work.forwards - self.passed, 0.0, rate)
        self.passed += amount
        return np.asarray(amount / rate)


class _Trainers:
    """Pipelines of all trainers."""

    def __init__(self, work: Workload, assumed: Assumptions, processor: Processor | None) -> None:
        self.work, self.assumed, self.processor = work, assumed, processor
        count = len(work.brought)
        self.total = work.brought[:, -1]
        self.brought, self.converted = np.zeros(count), np.zeros(count)
        self.unit: Ints = np.zeros(count, np.int64)
        self.waiting = np.zeros((count, len(work.fed)))
        self.sent = np.zeros(count)
        self.held = np.zeros(count)  # converted, and not yet written to all who get it
        self.begin_s = assumed.skew_s * np.random.default_rng(0).permutation(count) / max(1, count - 1)
        self.peak = 0.0
        self.sends = np.full(count, assumed.rail_bytes_per_s * assumed.step_s)
        self.converts = np.full(count, assumed.convert_gbytes_per_s * 1e9 * assumed.step_s)
        if processor is not None:
            self.sends = np.minimum(
                self.sends, np.minimum(processor.most(processor.write), processor.most(processor.post))
            )
            self.converts = np.minimum(self.converts, processor.most(processor.convert))

    @property
    def done(self) -> bool:
        return bool(
            (self.work.written - self.sent < DONE * self.waiting.shape[1]).all() and (self.waiting < DONE).all()
        )

    def step(self, now_s: float, receivers: _Receivers) -> tuple[Floats, Floats, Floats]:
        """Move every stage on; return how busy each trainer was with each. Later stages first: input is of before."""
        assumed, dt = self.assumed, self.assumed.step_s
        rail = assumed.rail_bytes_per_s * dt
        moved = share(self.waiting, self.sends, receivers.ports)
        ready = np.minimum(self.brought, self._together() * self.total)
        convert = np.clip(ready - self.converted, 0.0, self.converts)
        if self.processor is None or not self.processor.contended:
            checked = None
        else:
            checked = receivers.checkable
            convert, moved, checked = self.processor.slowed(convert, moved, checked)
        before = np.maximum(self.waiting.sum(axis=1), DONE)
        self.waiting -= moved
        self.waiting[self.waiting < 1e-3] = 0.0
        self.held *= np.clip(1.0 - moved.sum(axis=1) / before, 0.0, 1.0)
        self.sent += moved.sum(axis=1)
        receivers.take(moved.sum(axis=0))
        receivers.check(receivers.checkable if checked is None else checked)
        self.converted += convert
        self._release()

        started = now_s >= self.begin_s
        in_use = self._scratch()
        self.peak = max(self.peak, float(in_use.max()))
        room = np.maximum(assumed.watermark_bytes - in_use, 0.0)
        rate = assumed.bring_gbytes_per_s * 1e9 * dt if assumed.offloaded else np.inf
        bring = np.minimum(np.minimum(rate, room), self.total - self.brought) * started
        self.brought += bring
        busy = bring / rate if assumed.offloaded else np.zeros_like(bring)
        return busy, convert / (assumed.convert_gbytes_per_s * 1e9 * dt), moved.sum(axis=1) / rail

    def _together(self) -> Floats:
        """Return which part of its shard each trainer may convert: maxima of the whole team must be known."""
        least = np.ones(len(self.total))
        np.minimum.at(least, self.work.team, np.where(self.total > 0, self.brought / np.maximum(self.total, 1.0), 1.0))
        return least[self.work.team]

    def _scratch(self) -> Floats:
        """Bytes brought and not yet written; a unit in work counts as what was brought of it."""
        return np.asarray(self.brought - _until(self.work.brought, self.unit) + self.held)

    def _release(self) -> None:
        """Put the units that are converted to their end on the rail."""
        after = (self.work.brought <= self.converted[:, None] + DONE).sum(axis=1)
        rows = np.arange(len(after))
        begin, end = self.work.first_entry[rows, self.unit], self.work.first_entry[rows, after]
        counts = end - begin
        if counts.any():
            sender = np.repeat(rows, counts)
            entry = np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            np.add.at(self.waiting, (sender, self.work.entry_receiver[entry]), self.work.entry_bytes[entry])
            self.held += _until(self.work.converted, after) - _until(self.work.converted, self.unit)
        self.unit = after


def _until(totals: Floats, unit: Ints) -> Floats:
    """Return for each trainer the total up to the beginning of a unit."""
    found = np.take_along_axis(totals, np.maximum(unit - 1, 0)[:, None], axis=1)[:, 0]
    return np.asarray(np.where(unit > 0, found, 0.0))
