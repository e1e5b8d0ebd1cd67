"""Progress: how far an open update is, and when what happened."""

from __future__ import annotations

from time import monotonic, process_time

import anyio

from asyncfabric.weights.commit.coordinator import Coordinator, Phase
from asyncfabric.weights.update.reports import CodingReport, UpdateReport


class Progress:
    """An update that is open.

    Attributes:
        version: of it.
        receivers: who takes part.
        marks, cores: moments, by what happened then, and the core time of the process until then.
        wrote: trainers whose writes have ended.
        silent: trainers that will not say so any more.
        done: set when it is decided or aborted.
        codings: what trainers told of them.
        sent_bytes: that trainers wrote, as they told.
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
            self.version, self.receivers, end - marks["begin"], ready - marks["begin"], wrote - ready,
            decided - ready, end - decided, self.cores.get("told", self.cores["begin"]) - self.cores["begin"],
            tuple(self.codings), self.sent_bytes,
        )  # fmt: skip
