"""How much of each thing that costs core time every rank does in an update: the plan in the units of `HostCosts`. Pure.

The same counts are fitted to measured core time and, times the fitted costs, drive the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncfabric.sim.costs import COSTS, HostCosts
from asyncfabric.sim.message_counts import forwarded_messages, messages_of, messages_of_coordinator
from asyncfabric.sim.workload import Floats, Workload
from asyncfabric.weights.plan.batch import all_sent
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan

Thread = Literal[
    "trainer loop",
    "trainer engine",
    "trainer work",
    "receiver loop",
    "receiver engine",
    "receiver work",
    "coordinator begins",
    "coordinator",
]
"""Each is one thread of every process of that role; the coordinator's are taken together, and distinguished by whether
everybody may write already."""

THREADS: tuple[Thread, ...] = (
    "trainer loop",
    "trainer engine",
    "trainer work",
    "receiver loop",
    "receiver engine",
    "receiver work",
    "coordinator begins",
    "coordinator",
)

GB, US, MS = 1e-9, 1e-6, 1e-3


@dataclass(frozen=True, eq=False)
class SentRuns:
    """How senders carry pieces out, where that is not in the runs of the plan.

    Attributes:
        run_bytes: (pieces,): of one write.
        gathered: (pieces,): whether what is not converted is put in order before it is hashed and written.
        boxed: (pieces,): whether the engine puts it in order and hashes it while it writes it, instead.
    """

    run_bytes: Ints
    gathered: NDArray[np.bool_]
    boxed: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Labour:
    """For each thread a matrix (ranks that have it, costs): times `HostCosts.values` it is seconds of a core."""

    counts: dict[Thread, Floats]

    def seconds(self, thread: Thread, costs: HostCosts) -> Floats:
        """Return the core seconds of a thread in each rank."""
        return np.asarray(self.counts[thread] @ costs.values)

    def total_s(self, costs: HostCosts) -> float:
        """Return the core seconds of everybody."""
        return float(sum(self.seconds(thread, costs).sum() for thread in THREADS))

    def longest_s(self, costs: HostCosts) -> float:
        """Return the core seconds of the busiest thread of a trainer or a receiver: nothing is over sooner."""
        ranks = (thread for thread in THREADS if not thread.startswith("coordinator"))
        return max(float(self.seconds(thread, costs).max(initial=0.0)) for thread in ranks)


def labour_of(plan: Plan, work: Workload, sent: SentRuns | None = None, *, shared: bool = False) -> Labour:
    """Return the labour of a plan.

    Args:
        plan: with its replicas.
        work: of that plan: its units are those that event loops handle.
        sent: as senders carry the pieces out; None: in the plan's own runs, from where they lie.
        shared: whether trainers share processes.
    """
    receivers = len(work.fed)
    counts = {thread: np.zeros((_ranks(thread, plan, receivers), len(COSTS))) for thread in THREADS}
    runs = plan.pieces.run_bytes if sent is None else sent.run_bytes
    none = np.zeros(len(runs), bool)
    gathered, boxed = (none, none) if sent is None else (sent.gathered, sent.boxed)
    weights = plan.pieces.run_bytes * plan.pieces.runs
    writes = weights // np.maximum(runs, 1) + plan.pieces.scale_runs
    form = np.zeros(len(plan.pieces), np.int64)
    for kind in plan.kinds:
        form[kind.first : kind.first + kind.count] = 2 if kind.block else int(kind.dtype != kind.to)

    def put(thread: Thread, name: str, unit: float, values: Floats | Ints | float) -> None:
        counts[thread][:, COSTS.index(name)] += np.asarray(values) * unit

    names = ("written", "boxed", "writes", "hashed", "gathered", "cast", "fp8")
    per_trainer = {name: np.zeros(plan.trainers) for name in names}
    for rank, batch in enumerate(all_sent(plan)):
        once = batch.piece[np.flatnonzero(np.diff(batch.box, prepend=-1))]  # a box is converted and hashed once
        size = plan.piece_bytes[once]
        sizes, by_engine = plan.piece_bytes[batch.piece], boxed[batch.piece]
        per_trainer["written"][rank] = sizes[~by_engine].sum()
        per_trainer["boxed"][rank] = sizes[by_engine].sum()
        per_trainer["writes"][rank] = writes[batch.piece].sum()
        per_trainer["hashed"][rank] = size[~boxed[once]].sum()
        per_trainer["gathered"][rank] = size[(form[once] == 0) & gathered[once]].sum()
        per_trainer["cast"][rank] = size[form[once] == 1].sum()
        per_trainer["fp8"][rank] = size[form[once] == 2].sum()
    put("trainer engine", "write_s_per_gb", GB, per_trainer["written"])
    put("trainer engine", "box_s_per_gb", GB, per_trainer["boxed"])
    put("trainer engine", "write_us", US, per_trainer["writes"])
    put("trainer work", "checksum_s_per_gb", GB, per_trainer["hashed"])
    put("trainer work", "gather_s_per_gb", GB, per_trainer["gathered"])
    put("trainer work", "cast_s_per_gb", GB, per_trainer["cast"])
    put("trainer work", "fp8_s_per_gb", GB, per_trainer["fp8"])
    put("trainer loop", "unit_ms", MS, (np.diff(work.brought, axis=1, prepend=0.0) > 0).sum(axis=1))
    messages_sent, received = messages_of(work)
    senders, rows = _senders_and_rows(plan)
    put("trainer loop", "message_ms", MS, messages_sent)
    put("trainer loop", "shared_ms" if shared else "process_ms", MS, 1.0)
    put("receiver engine", "receive_s_per_gb", GB, work.fed)
    put("receiver engine", "write_s_per_gb", GB, work.forwards)
    put("receiver work", "checksum_s_per_gb", GB, work.fed + work.gets)
    passed_on, received_on = forwarded_messages(plan, work)
    put("receiver loop", "message_ms", MS, passed_on)
    put("receiver loop", "report_ms", MS, received + received_on)
    put("receiver loop", "opened_ms", MS, senders)
    put("receiver work", "row_us", US, rows)
    put("receiver loop", "process_ms", MS, 1.0)
    begins, ends = messages_of_coordinator(plan)
    put("coordinator begins", "begin_message_ms", MS, float(begins))
    put("coordinator", "end_message_ms", MS, float(ends))
    put("coordinator", "update_ms", MS, 1.0)
    return Labour(counts)


def _senders_and_rows(plan: Plan) -> tuple[Ints, Ints]:
    """Return how many senders each receiver has, and how many rows it awaits."""
    receiver = plan.pieces.receiver[plan.row_piece].astype(np.int64)
    everybody = plan.trainers + 2 * plan.receivers
    senders = []
    for one in plan.replicas:
        pairs = np.unique(receiver * everybody + one.senders)
        senders.append(np.bincount(pairs // everybody, minlength=plan.receivers))
    rows = np.tile(np.bincount(receiver, minlength=plan.receivers), len(plan.replicas))
    return np.concatenate(senders), rows


def _ranks(thread: Thread, plan: Plan, receivers: int) -> int:
    if thread.startswith("trainer"):
        return plan.trainers
    return receivers if thread.startswith("receiver") else 1
