"""UpdateProgress: how far an open update is, the moments of its steps, and the report of its end.

Runs on the event loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic, process_time

import anyio

from asyncfabric.weights.coordinator.decision import Coordinator, Phase
from asyncfabric.weights.messages import CodingReport


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """How an update went.

    Attributes:
        version: that was decided.
        receivers: that verified it.
        seconds: from the first trainer's offer that was complete to the decision.
        prepare_s: until every receiver had opened its memory.
        write_s: until every trainer's writes had ended.
        verify_s: until every receiver had verified; receivers verify while others still write.
        decide_s: for the log.
        prepare_core_s: core time of the coordinator's process until Write had been sent to every trainer.
        codings: what trainers reported of those receivers that read codings which they write.
        sent_bytes: that trainers wrote, coded ones as they were sent; what receivers forwarded is not in it.
    """

    version: int
    receivers: tuple[str, ...]
    seconds: float
    prepare_s: float
    write_s: float
    verify_s: float
    decide_s: float
    prepare_core_s: float
    codings: tuple[CodingReport, ...] = ()
    sent_bytes: int = 0


class UpdateProgress:
    """An update that is open.

    Attributes:
        version: of it.
        receivers: who takes part.
        marks, cores: moments, by what happened then, and the core time of the process until then.
        wrote: trainers whose writes have ended.
        silent: trainers that will not report that any more.
        done: set when it is decided or aborted.
        codings: what trainers reported of them.
        sent_bytes: that trainers wrote, as they reported.
        failure: why it was aborted, empty if it was not.
    """

    def __init__(self, version: int) -> None:
        self.version: int = version
        self.receivers: tuple[str, ...] = ()
        self.marks: dict[str, float] = {"begin": monotonic()}
        self.cores: dict[str, float] = {"begin": process_time()}
        self.wrote: set[str] = set()
        self.silent: set[str] = set()
        self.codings: list[CodingReport] = []
        self.sent_bytes: int = 0
        self.done: anyio.Event = anyio.Event()
        self.failure: str = ""

    def mark(self, what: str) -> None:
        """Note when something happened first."""
        if what not in self.marks:
            self.marks[what], self.cores[what] = monotonic(), process_time()

    def follow(self, machine: Coordinator, trainers: frozenset[str]) -> None:
        """Note how far the machine is with it; `done` is set when it is idle again."""
        if self.done.is_set() or machine.begun < self.version:
            return
        phase = machine.phase
        if phase in (Phase.WRITING, Phase.DECIDING):
            self.mark("ready")
        if self.wrote >= trainers:
            self.mark("wrote")
        if phase is Phase.DECIDING:
            self.mark("verified")
        if phase is Phase.IDLE:
            self.mark("end")
            self.failure = "" if machine.committed == self.version else machine.failure
            self.done.set()

    def report(self) -> UpdateReport:
        """Return the report of an update that was decided."""
        marks = self.marks
        end = marks.get("end", marks["begin"])
        decided = marks.get("verified", end)
        wrote = marks.get("wrote", decided)
        ready = marks.get("ready", marks["begin"])
        return UpdateReport(
            self.version,
            self.receivers,
            end - marks["begin"],
            ready - marks["begin"],
            wrote - ready,
            decided - ready,
            end - decided,
            self.cores.get("sent", self.cores["begin"]) - self.cores["begin"],
            tuple(self.codings),
            self.sent_bytes,
        )
