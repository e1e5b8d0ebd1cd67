"""Version: one version that a trainer publishes, what it waits for, and what is worked out for it before it is sent.

Runs on the event loop's thread. Program, exchange and scratch memory are kept while the plan stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import anyio

from asyncfabric import Fabric, RemoteProtocolError
from asyncfabric.weights.agreement import RosterPlans
from asyncfabric.weights.channel import COORDINATOR, trainer_name
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.messages import CodedSlots, CodingReport, Maxima, Roster, Write
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.sender.exchange import Exchange
from asyncfabric.weights.sender.program import Program
from asyncfabric.weights.sender.scratch import Scratch, open_scratch
from asyncfabric.weights.sender.shards import Shards
from asyncfabric.weights.writing import Gate


@dataclass(slots=True)
class Stages:
    """Seconds that each stage was busy, and what went through; stages overlap."""

    convert_s: float = 0.0
    checksum_s: float = 0.0
    write_s: float = 0.0
    staging_wait_s: float = 0.0
    maxima_wait_s: float = 0.0
    bytes: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True)
class PublishReport:
    """How one trainer's part of an update went.

    Attributes:
        version: that was decided.
        seconds: from the call to the decision.
        wait_s: until every receiver had opened its memory.
        write_s: from the first box to the last write that ended; the stages below overlap in it.
        decide_s: from then to the decision.
        stages: seconds of work of each stage, bytes and writes.
        staged_bytes: the most that was staged at once.
        receivers: that this trainer wrote to.
        codings: for each receiver that reads a coding which this trainer writes: what was used, and why.
        sent_bytes: that were written, coded ones as they were sent; `stages` counts those that went plain.
        failures: where the version went to engines of several layouts: why it was aborted for some.
    """

    version: int
    seconds: float
    wait_s: float
    write_s: float
    decide_s: float
    stages: Stages
    staged_bytes: int
    receivers: tuple[str, ...]
    codings: tuple[CodingReport, ...] = ()
    sent_bytes: int = 0
    failures: tuple[str, ...] = ()


def merged(reports: Sequence[PublishReport], failures: tuple[str, ...]) -> PublishReport:
    """Return one report of what went side by side: times are the longest, work, memory and bytes are sums."""
    first = reports[0]
    if len(reports) == 1:
        return replace(first, failures=failures)
    totals = {each.name: sum(getattr(one.stages, each.name) for one in reports) for each in fields(Stages)}
    return PublishReport(
        first.version,
        max(one.seconds for one in reports),
        max(one.wait_s for one in reports),
        max(one.write_s for one in reports),
        max(one.decide_s for one in reports),
        Stages(**totals),
        sum(one.staged_bytes for one in reports),
        tuple(name for one in reports for name in one.receivers),
        tuple(coding for one in reports for coding in one.codings),
        sum(one.sent_bytes for one in reports),
        failures,
    )


class AwaitedMessages(NamedTuple):
    """What a version that is being published waits for next, and from whom."""

    what: str
    names: tuple[str, ...]


class Publication:
    """A version that is being published.

    Attributes:
        version: of it.
        seated: whether it is known who takes part.
        write: the message that it may be written.
        gates, offered_slots, kinds: what receivers that opened their memory sent.
        gone: participants that the coordinator has lost since its roster.
        kind: of the checksums.
        written: whether everything is.
        outcome: None while it is open, "" once it is decided, else why it was aborted.
        scope: of the task that carries it.
    """

    def __init__(self, version: int) -> None:
        """Begin with nothing."""
        self.version: int = version
        self.seated: bool = False
        self.write: Write | None = None
        self.gates: dict[str, Gate] = {}
        self.gone: set[str] = set()
        self.offered_slots: dict[str, CodedSlots | None] = {}
        self.kinds: set[ChecksumKind] = set()
        self.kind: ChecksumKind = "xxh3"
        self.written: bool = False
        self.outcome: str | None = None
        self.scope: anyio.CancelScope = anyio.CancelScope()

    def taking_part(self, program: Program) -> set[str] | None:
        """Return the receivers that rows of this trainer are for and that are still there; None before Write."""
        if self.write is None:
            return None
        return {name for name in program.receivers if name in self.write.receivers and name not in self.gone}

    def awaited(self, program: Program | None, maxima: set[str]) -> AwaitedMessages | None:
        """Return what it waits for; None once it is over. `maxima`: of whom some are still to come."""
        if self.outcome is not None:
            return None
        if not self.seated:
            return AwaitedMessages("the offers of all trainers", (COORDINATOR,))
        here = self.taking_part(program) if program is not None else None
        if here is None:
            return AwaitedMessages("receivers to open their memory", (COORDINATOR,))
        if missing := here - self.gates.keys():
            return AwaitedMessages("keys of receivers", tuple(sorted(missing)))
        if maxima:
            return AwaitedMessages("maxima of blocks", tuple(sorted(maxima)))
        if not self.written:
            return AwaitedMessages("its writes", tuple(sorted(here)))
        return AwaitedMessages("the decision", (COORDINATOR,))


class Preparation:
    """Of one trainer."""

    def __init__(
        self, fabric: Fabric, plan: Plan, rank: int, shards: Shards, scratch_bytes: int, gathers: bool = False
    ) -> None:
        """Begin with a plan, whose replicas do not matter; `gathers` as for Program."""
        self._fabric = fabric
        self._rank = rank
        self._shards = shards
        self._scratch_bytes = scratch_bytes
        self._gathers = gathers
        self._plans = RosterPlans(plan)
        self._ranks = {trainer_name(one): one for one in range(plan.trainers)}
        self._plan: Plan | None = None
        self._made: tuple[Plan, Program, Exchange, Scratch] | None = None
        self._scratch_end: AsyncExitStack | None = None
        self._begun = 0
        self._early: list[tuple[int, Maxima]] = []  # of versions that are not begun here

    def seat(self, roster: Roster) -> None:
        """Take who takes part in the next version. Raises RemoteProtocolError when the coordinator has another plan."""
        self._plan = self._plans.plan(roster)

    async def begin(self, version: int) -> tuple[Program, Exchange, Scratch]:
        """Return what is worked out for the plan of now, the exchange open for a version.

        Raises:
            RemoteProtocolError: no roster came.
            ValueError: the scratch is too small for one piece.
            DeviceError: no memory left.

        Cancellation: nothing was opened, or it is kept.
        """
        plan = self._plan
        if plan is None:
            raise RemoteProtocolError("the coordinator sends Write before it names who takes part")
        if self._made is None or self._made[0] is not plan:
            program = Program(plan, self._rank, self._shards, self._gathers)
            sent = [(box.parameter_number, box.kind_number) for box in program.boxes if box.measured]
            exchange = Exchange(plan, self._rank, self._shards, sent)
            kept = self._made[3] if self._made is not None else None
            scratch = kept if kept is not None and kept.serves(program) else await self._open_scratch(program)
            self._made = (plan, program, exchange, scratch)
        _, program, exchange, scratch = self._made
        self._begun = version
        exchange.begin(version)
        early, self._early = self._early, []
        for rank, message in early:
            self._take(rank, message)
        return program, exchange, scratch

    def take_maxima(self, sender: str, message: Maxima) -> None:
        """Take another trainer's maxima, perhaps before the plan is here. Raises RemoteProtocolError for wrong ones."""
        self._take(self._ranks.get(sender, -1), message)

    def needs(self, name: str, version: int) -> bool:
        """Return whether messages of another participant matter for a version.

        A receiver's do that rows of this trainer are for, and those of a trainer whose maxima are still to come; with a
        plan that nothing was made of yet, anybody's may.
        """
        if self._made is None or self._made[0] is not self._plan:
            return True
        _, program, exchange, _ = self._made
        return name in program.receivers or name in exchange.awaited(version)

    def standing(self, version: int) -> tuple[Program | None, set[str]]:
        """Return the program of a version that is under way here, and of whom maxima are still to come."""
        if self._made is None or self._begun != version:
            return None, set()
        return self._made[1], self._made[2].awaited(version)

    def _take(self, rank: int, message: Maxima) -> None:
        if message.version > self._begun:
            self._early.append((rank, message))  # its plan may be another one than that of now
        elif self._made is not None:
            self._made[2].take(rank, message)

    async def aclose(self) -> None:
        """Give back the staging memory.

        Cancellation: shielded.
        """
        with anyio.CancelScope(shield=True):
            if self._scratch_end is not None:
                end, self._scratch_end = self._scratch_end, None
                await end.aclose()

    async def _open_scratch(self, program: Program) -> Scratch:
        await self.aclose()
        self._scratch_end = AsyncExitStack()
        return await self._scratch_end.enter_async_context(
            open_scratch(self._fabric, program, self._scratch_bytes, self._shards.device)
        )
