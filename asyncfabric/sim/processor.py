"""Cores as a resource of the simulation: what a step of each thread costs, and whose turn it is. Pure.

A thread uses at most one core. Threads of one machine share its cores as a fair scheduler lets them: whoever wants
less than an equal share gets it, the others share what is left.
"""

from __future__ import annotations

import numpy as np

from asyncfabric.sim.costs import COSTS, Hosts
from asyncfabric.sim.labour import Labour, Thread
from asyncfabric.sim.workload import Floats, Workload
from asyncfabric.weights.plan.boxes import Ints

THREADS_OF_A_RANK = 3
"""Of a trainer or a receiver: where each has a core of its own, `most` is all that there is."""

ROUNDS = 8
"""Rounds of handing out what is left of a machine."""

TURNS = 4
"""Times that what threads leave, because another one holds their stage back, is handed out again."""


def grant(wanted: Floats, host: Ints, cores_s: Floats) -> Floats:
    """Return the core seconds that each thread gets of those it wants in a step.

    Args:
        wanted: (threads,): core seconds.
        host: (threads,): the machine of each.
        cores_s: (machines,): core seconds that each machine has.
    """
    given = np.zeros_like(wanted)
    for _ in range(ROUNDS):
        asking = wanted - given > 1e-12
        if not asking.any():
            break
        left = np.maximum(cores_s - np.bincount(host, weights=given, minlength=len(cores_s)), 0.0)
        each = left / np.maximum(np.bincount(host, weights=asking, minlength=len(cores_s)), 1)
        given += np.minimum(wanted - given, each[host]) * asking
    return given


class Processor:
    """Core seconds for a byte of each stage, and the sharing of a step. Rates are 0 for what costs nothing."""

    def __init__(self, hosts: Hosts, work: Workload, labour: Labour, step_s: float) -> None:
        """Spread each thread's core time over the bytes of its stage, evenly."""
        self._step_s, self._cores_s = step_s, hosts.cores * step_s
        self.contended: bool = hosts.ranks != 1 or hosts.cores < THREADS_OF_A_RANK
        trainers, receivers = len(work.brought), len(work.fed)

        def rate(thread: Thread, total: Floats) -> Floats:
            return np.asarray(labour.seconds(thread, hosts.costs) / np.maximum(total, 1.0))

        rank = np.arange(trainers + receivers)
        machine = rank // hosts.ranks if hosts.ranks else rank * 0
        begins_s = float(labour.seconds("coordinator begins", hosts.costs).sum())
        verified_s = (receivers * hosts.costs.end_message_ms + hosts.costs.update_ms) * 1e-3  # all at once at worst
        self.coordinator_s: float = (begins_s + verified_s) / min(1.0, hosts.cores)
        left = self._still_to_open(hosts, int(np.bincount(machine).max()))

        def loop(thread: Thread, total: Floats, before: Floats | float = 0.0) -> Floats:
            report_s = labour.seconds(thread, hosts.costs) - (1.0 - left) * hosts.costs.process_ms * 1e-3 - before
            return np.asarray(report_s / np.maximum(total, 1.0))

        self.convert: Floats = rate("trainer work", work.brought[:, -1])
        self.write: Floats = rate("trainer engine", work.written)
        self.post: Floats = loop("trainer loop", work.written)
        self.receive: Floats = rate("receiver engine", work.fed)
        opened_s = labour.counts["receiver loop"][:, COSTS.index("opened_ms")] * hosts.costs.opened_ms
        report_s = trainers * hosts.costs.begin_message_ms * 1e-3  # trainers learn who takes part behind all receivers
        self.open_s: float = max(0.0, float(opened_s.max(initial=0.0)) - report_s) / min(1.0, hosts.cores)
        self.reported: Floats = loop("receiver loop", work.fed + work.gets, opened_s)
        self.verify: Floats = rate("receiver work", work.fed + work.gets)
        if hosts.one_interpreter:
            self.reported, self.verify = self.reported + self.verify, np.zeros_like(self.verify)
        mine, theirs = machine[:trainers], machine[trainers:]
        self._host: Ints = np.concatenate([mine, mine, mine, theirs, theirs, theirs]).astype(np.int64)
        self._cuts = np.cumsum([trainers] * 3 + [receivers] * 2)
        messages = np.maximum(labour.counts["receiver loop"][:, COSTS.index("report_ms")] * 1e3, 1)
        last = (self.reported + self.verify) * (work.fed + work.gets) / messages
        self.tail_s: float = float(last.max(initial=0.0))

    def _still_to_open(self, hosts: Hosts, busiest: int) -> float:
        """Return which part of `process_ms` is left when the coordinator is through: the other cores open meanwhile."""
        cores = hosts.cores if hosts.ranks else max(0.0, hosts.cores - 1.0)
        opened = self.coordinator_s * cores / max(1e-30, busiest * hosts.costs.process_ms * 1e-3)
        return 1.0 - min(1.0, opened)

    def most(self, cost: Floats) -> Floats:
        """Return the bytes that a thread which does nothing else gets through in a step."""
        return np.asarray(self._step_s / np.maximum(cost, 1e-30))

    def slowed(self, convert: Floats, moved: Floats, verify: Floats) -> tuple[Floats, Floats, Floats]:
        """Return what of a step's work there are cores for.

        A write needs three threads, and goes on as far as the slowest of them; what the others then leave of their
        turn is handed out again.

        Args:
            convert: (trainers,) bytes.
            moved: (trainers, receivers) bytes.
            verify: (receivers,) bytes.

        Returns:
            the same, less what nobody had time for.
        """
        cores_s = np.full(int(self._host.max()) + 1, self._cores_s)
        left = (convert, moved, verify)
        for turn in range(TURNS):
            wanted = self._wanted(*left)
            if turn and not (wanted.any() and cores_s.any()):
                break  # in the first turn also what costs nothing is done
            given = np.split(grant(wanted, self._host, cores_s), self._cuts)
            part = [
                np.where(want > 0, give / np.maximum(want, 1e-30), 1.0)
                for want, give in zip(np.split(wanted, self._cuts), given, strict=True)
            ]
            writes = np.minimum(np.minimum(part[1], part[2])[:, None], part[3][None, :])
            done = (left[0] * part[0], left[1] * writes, left[2] * np.minimum(part[4], part[5]))
            spent = np.bincount(self._host, weights=self._wanted(*done), minlength=len(cores_s))
            cores_s = np.where(cores_s - spent > 1e-3 * self._cores_s, cores_s - spent, 0.0)
            left = (left[0] - done[0], left[1] - done[1], left[2] - done[2])
        return convert - left[0], moved - left[1], verify - left[2]

    def _wanted(self, convert: Floats, moved: Floats, verify: Floats) -> Floats:
        """Return the core seconds of every thread for so many bytes."""
        sent, got = moved.sum(axis=1), moved.sum(axis=0)
        return np.concatenate(
            [
                convert * self.convert,
                sent * self.write,
                sent * self.post,
                got * self.receive,
                verify * self.reported,
                verify * self.verify,
            ]
        )
