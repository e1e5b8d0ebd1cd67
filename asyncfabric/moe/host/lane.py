"""Lane: one all-to-all of rows among members, there and back again; the two halves are `forward` and `backward`.

Runs on the event loop's thread. What is common to both halves: memory, keys, counters, posting, and the rule of turns.

MOE-1 (turns): step n uses the memory of turn n mod in_flight. A member sends step n only after it combined step
n - in_flight. Its peers' rows that came back for that step show that they had taken its records and rows; its own
record of step n shows that it has taken the rows that came back. So nobody writes to what was not read yet, and no
message exists for that alone.
MOE-2 (passes): a sender writes its part of pass p > 0 to a receiver only after that receiver reported that it took the
pass before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import torch

from asyncfabric import BusyError, Fabric, Peer, PeerGroup, RegionKey, ScatterTarget, Transfer
from asyncfabric._kernels.rows import RowBytes
from asyncfabric.errors import FabricError, StaleKeyError
from asyncfabric.moe.faults import missing
from asyncfabric.moe.host.arrivals import ArrivalKind, RankArrivals
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.memory import LaneMemory, LaneSlots, ReceivingMemory, Slot
from asyncfabric.moe.host.passes import PassPlan, Segment, rows_before
from asyncfabric.moe.host.record import Bytes, Rows
from asyncfabric.moe.host.routing import Route
from asyncfabric.moe.host.shelf import Shelf

_Posted = tuple[Transfer, tuple[int, ...]]
"""A transfer, and the members that it goes to."""


class Flow(NamedTuple):
    """What goes one way: rows that each receiver (first index) gets from each sender, room of its area, most passes."""

    counts: list[list[int]]
    room: int
    passes: int


@dataclass(slots=True)
class LaneStep:
    """One step of a lane: what was sent, what is known of what arrives, and how far it is.

    Attributes:
        number: of the step.
        turn: which memory it uses.
        route: what this member sends.
        bounds: where the tokens for each member begin in the route; one more entry.
        payload: rows of the tokens, shape [tokens, row_bytes]; read until everything is sent.
        counts: rows from each member (first index) to each member, once all records are there.
        offsets: where the rows of each member begin; one more entry.
        rows: what the arrived rows are about, in the order of members, then of tokens.
        taken: passes of the rest that were taken from the area.
        posted: passes of the rest that were posted.
        partial: output rows, while some of their passes are still to come.
        back_posted, back_taken: passes of what comes back.
        sums: sums of the rows that came back, while some of their passes are still to come.
    """

    number: int
    turn: int
    route: Route
    bounds: list[int]
    payload: RowBytes
    counts: list[list[int]] | None = None
    offsets: list[int] | None = None
    rows: Rows | None = None
    taken: int = 0
    posted: int = 0
    partial: Bytes | None = None
    back_posted: int = 0
    back_taken: int = 0
    sums: torch.Tensor | None = None
    flows: dict[str, Flow] = field(default_factory=dict)
    plans: dict[tuple[str, int], PassPlan] = field(default_factory=dict)


class Lane:
    """Memory, keys and counters of one lane at one member."""

    def __init__(
        self,
        fabric: Fabric,
        memory: LaneMemory,
        arrivals: RankArrivals,
        me: int,
        names: Sequence[int],
        peers: Mapping[int, Peer],
        keys: Mapping[int, RegionKey],
    ) -> None:
        """Join what was opened: `me` is this member, `names` the ranks of all, peers and keys those of the others."""
        self.fabric: Fabric = fabric
        self.memory: LaneMemory = memory
        self.shape: LaneShape = memory.shape
        self.arrivals: RankArrivals = arrivals
        self.me: int = me
        # Whoever asks for the next step often holds the rows of the one before still.
        self.shelf: Shelf = Shelf(memory.shape.in_flight + 1)
        self.names: tuple[int, ...] = tuple(names)
        self._peers = peers
        self._keys = keys
        self._posted: dict[str, list[_Posted]] = {}
        self._reached: dict[int, ReceivingMemory] = {me: memory.incoming}
        self._slots: dict[int, LaneSlots] = {}

    @property
    def mapped_ranks(self) -> tuple[int, ...]:
        """The other ranks whose receiving memory this process has mapped: it stores records and rows there itself."""
        return tuple(self.names[member] for member in sorted(self._reached) if member != self.me)

    def find_mapped(self) -> None:
        """Look whose receiving memory this process has mapped, once writes to all members have ended."""
        for member, key in self._keys.items():
            if (memory := self.fabric.mapped_memory(key)) is not None:
                self._reached[member] = ReceivingMemory(self.shape, memory)
        self._slots.clear()

    def reach(self, member: int) -> ReceivingMemory | None:
        """Return the receiving memory of a member that this process stores to itself, its own too; else None."""
        return self._reached.get(member)

    def slots(self, turn: int) -> LaneSlots:
        """Return where records and private rows for all members are put: in their memory, or in the staging memory."""
        found = self._slots.get(turn)
        if found is None:
            found = self._slots[turn] = LaneSlots.of(self._slot(turn, member) for member in range(self.shape.members))
        return found

    def arrival(self, member: int) -> ScatterTarget:
        """Return a write without bytes: for members that this process stores to itself, or that get nothing."""
        return ScatterTarget(self._keys[member], 0, 0, 0)

    def staged(self, member: int, begin: int, at: int, length: int) -> ScatterTarget:
        """Return a write of so many bytes of the staging region to byte `at` of the region of a member."""
        return ScatterTarget(self._keys[member], begin, at, length)

    def take_ended(self, what: str) -> None:
        """Forget what was posted as `what` and has ended; raises as `settle`."""
        posted = self._posted.get(what)
        if not posted:
            return
        ended = [transfer.done for transfer, _ in posted]
        self._posted[what] = [one for one, over in zip(posted, ended, strict=True) if not over]
        for (transfer, members), over in zip(posted, ended, strict=True):
            if over:
                self._result(transfer, members)

    async def settle(self, what: str) -> None:
        """Return when nothing that was posted as `what` reads the staging memory any more.

        Raises:
            MissingRankError: a write failed since its peer is lost, or has gone on without this rank.
            TransferError: a write failed.

        Cancellation: shielded; the fabric bounds it by its drain and peer deadlines. What is posted must arrive whole.
        """
        posted = self._posted.get(what)
        if not posted:
            return
        if pending := [transfer for transfer, _ in posted if not transfer.done]:
            with anyio.CancelScope(shield=True):
                for transfer in pending:
                    try:
                        await transfer
                    except FabricError:
                        pass  # reported below, when all have ended
        self.take_ended(what)

    async def close(self) -> None:
        """Drain what is posted, whatever became of it, and close the counters.

        Cancellation: shielded; bounded by the fabric's drain deadline.
        """
        for what in list(self._posted):
            try:
                await self.settle(what)
            except FabricError:
                pass  # whoever left the exchange knows already, or does not care any more
        self.arrivals.close()

    async def post(
        self, what: str, kind: ArrivalKind, turn: int, targets: Mapping[int, ScatterTarget], *, shield: bool
    ) -> None:
        """Write to several members in one transfer, each write one arrival of `kind` there.

        Args:
            what: under which name it is settled.
            kind: of message.
            turn: of the step.
            targets: the write to each member.
            shield: a wait until there is room is not cancelled.

        Raises:
            MissingRankError: a member is lost, or has gone on without this rank.

        Cancellation: nothing was posted; never, where it is shielded.
        """
        if not targets:
            return
        members, listed, imm = tuple(targets), list(targets.values()), self.arrivals.imm(kind, turn)
        while True:
            try:
                transfer = self.fabric.scatter(self.memory.staging, listed, imm)
                break
            except BusyError:
                with anyio.CancelScope(shield=shield):
                    await self.fabric.wait_writable()
            except FabricError as error:
                raise self._lost(error, members) from error
        self._posted.setdefault(what, []).append((transfer, members))

    async def send_empty(self, kind: ArrivalKind, turn: int, members: Iterable[int]) -> None:
        """Send one arrival of `kind` without data to each of these members, but not to this one.

        Cancellation: nothing was sent.
        """
        group = PeerGroup(self._peers[member] for member in members if member != self.me)
        while len(group):
            try:
                transfer = self.fabric.barrier(group, self.arrivals.imm(kind, turn))
                self._posted.setdefault("reported", []).append((transfer, ()))
                break
            except BusyError:
                await self.fabric.wait_writable()
            except FabricError as error:
                raise self._lost(error) from error

    def plan(self, step: LaneStep, which: str, receiver: int) -> PassPlan:
        """Return the passes of one receiver: of the `rest` that private slots do not hold, or of what goes `back`."""
        found = step.plans.get((which, receiver))
        if found is None:
            flow = self._flow(step, which)
            found = step.plans[which, receiver] = PassPlan(flow.counts[receiver], receiver, flow.room)
        return found

    def passes(self, step: LaneStep, which: str) -> int:
        """Return the most passes that any receiver has."""
        return self._flow(step, which).passes

    def outgoing(self, step: LaneStep, which: str, number: int) -> list[tuple[int, Segment]]:
        """Return what this member sends in a pass: (member, rows), for those that get any."""
        flow, me = self._flow(step, which), self.me
        sent = [(member, counts) for member, counts in enumerate(flow.counts) if counts[me]]
        if flow.passes == 1:  # mostly: everything goes at once
            return [(member, Segment(0, counts[me], rows_before(counts, member, me))) for member, counts in sent]
        segments = [(member, self.plan(step, which, member).segment(me, number)) for member, _ in sent]
        return [(member, segment) for member, segment in segments if segment.rows]

    def _flow(self, step: LaneStep, which: str) -> Flow:
        found = step.flows.get(which)
        if found is None:
            counts, private = step.counts, self.shape.private
            assert counts is not None
            room = self.shape.back_rows
            if which == "rest":
                room = self.shape.area_rows
                # Mostly private slots hold all.
                fits = max(map(max, counts)) <= private
                counts = [
                    [0 if fits else max(0, rows - private) for rows in each] for each in zip(*counts, strict=True)
                ]
            found = step.flows[which] = Flow(counts, room, -(-max(map(sum, counts)) // max(1, room)))
        return found

    def _slot(self, turn: int, member: int) -> Slot:
        reached = self.reach(member)
        return self.memory.staged_slot(member) if reached is None else reached.slot(turn, self.me)

    def _result(self, transfer: Transfer, members: Iterable[int]) -> None:
        try:
            transfer.result()
        except FabricError as error:
            raise self._lost(error, members) from error

    def _lost(self, error: FabricError, members: Iterable[int] = ()) -> FabricError:
        """Return what the failure of a write to members states of them; a dead key of one fails the whole scatter."""
        lost = [self.names[member] for member, peer in self._peers.items() if peer.lost]
        if not lost and isinstance(error, StaleKeyError):  # they closed the exchange, or excluded this rank
            lost = [self.names[member] for member in members if member != self.me]
        return missing(f"writing to the other ranks ({error})", lost, lost=True) if lost else error
