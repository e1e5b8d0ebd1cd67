"""Publisher: one trainer of weight updates: offers a version, writes it, waits for its outcome.

Runs on the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from threading import get_ident
from time import monotonic

import anyio

from asyncfabric import (
    BrokenError,
    BusyError,
    ClosedError,
    Fabric,
    FabricError,
    PeerError,
    RemoteProtocolError,
)
from asyncfabric._bridge.faults import another_loop
from asyncfabric._groups import beside, unwrapped
from asyncfabric._notice import Notice
from asyncfabric.control import PeerFound, PeerLost
from asyncfabric.weights.channel import AGAIN_S, COORDINATOR, Event, WeightChannel, trainer_name
from asyncfabric.weights.coding.choice import Rule, known_codings
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.device import HOST
from asyncfabric.weights.messages import (
    Abort,
    CodingReport,
    Failed,
    Gone,
    Maxima,
    Offered,
    Opened,
    Outcome,
    Roster,
    Taken,
    Unreachable,
    WeightMessage,
    Write,
    Wrote,
)
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.sender.coded import CodedSending
from asyncfabric.weights.sender.codings import SenderCodings
from asyncfabric.weights.sender.exchange import Exchange
from asyncfabric.weights.sender.pipeline import WeightSending
from asyncfabric.weights.sender.program import Program
from asyncfabric.weights.sender.scratch import Scratch
from asyncfabric.weights.sender.shards import ShardMap, Shards, gathers, open_shards
from asyncfabric.weights.sender.version import AwaitedMessages, Preparation, Publication, PublishReport
from asyncfabric.weights.writing import gate_of

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

SCRATCH_BYTES = 1 << 30


class WeightPublisher:
    """One trainer; made by `async with open_publisher(...)`.

    Attributes:
        rank: of the trainer.
    """

    def __init__(
        self,
        fabric: Fabric,
        channel: WeightChannel,
        rank: int,
        shards: Shards,
        preparation: Preparation,
        codings: SenderCodings | None = None,
    ) -> None:
        """Not for users: `async with open_publisher(...)`."""
        self.rank: int = rank
        self._fabric = fabric
        self._channel = channel
        self._shards = shards
        self._preparation = preparation
        self._codings = codings
        self._publication: Publication | None = None
        self._here = self._closed = False
        self._kind: ChecksumKind | None = None  # of the checksums of the last version
        self._changed = Notice()
        self._thread = get_ident()

    @property
    def awaited(self) -> AwaitedMessages | None:
        """What the version that is being published waits for next, and from whom; None when none is."""
        one = self._publication
        return one.awaited(*self._preparation.standing(one.version)) if one is not None else None

    async def wait_deserted(self, grace_s: float) -> None:
        """Return when there has been no session with the coordinator for so long.

        Cancellation: only this wait ends.
        """
        while True:
            while self._here:
                await self._changed.wait()
            with anyio.move_on_after(grace_s) as grace:
                while not self._here:
                    await self._changed.wait()
            if grace.cancelled_caught:
                return

    async def publish(self, version: int) -> PublishReport:
        """Write the shards, as they are now, to every replica as this version; return when it is decided.

        Every trainer publishes the same version. The shards must not change meanwhile, and a step of an optimizer is
        noticed in host memory; those on a GPU are read once the stream that is current for torch is past what it was
        given before this call.

        Raises:
            BusyError: another version is being published.
            RuntimeError: called in another thread than that of the event loop it was opened in.
            ValueError: the scratch is too small for one piece.
            BrokenError: the version was aborted, as when weights changed meanwhile, or the coordinator is lost; the
                text states why. Replicas serve what they served; publish a later version.

        Cancellation: what was posted drains, then the coordinator receives that and aborts the version.
        """
        if get_ident() != self._thread:
            raise another_loop()
        if self._publication is not None:
            raise BusyError(f"version {self._publication.version} is being published")
        one = self._publication = Publication(version)
        began = monotonic()
        try:
            while not self._here:
                if self._closed:
                    raise ClosedError(f"the channel of trainer {self.rank} is closed")
                await self._changed.wait()
            await self._shards.settled()
            await self._channel.send(COORDINATOR, Offered(version))
            report = await self._carry_out(one, began)
        except BaseException as error:
            named = isinstance(error, Exception)
            reason = f"{type(error).__name__}: {error}" if named else "its publish was cancelled before it was decided"
            with anyio.CancelScope(shield=True):
                await self._post(COORDINATOR, Failed(version, reason[:2000]))
            raise
        finally:
            self._publication = None
            if self._codings is not None:
                self._codings.end(version if one.outcome == "" else 0)
        return report

    async def _carry_out(self, one: Publication, began: float) -> PublishReport:
        sending: WeightSending | None = None
        program: Program | None = None
        started = ended = began
        used: tuple[CodingReport, ...] = ()
        scratch: Scratch | None = None
        sent_bytes = 0
        with one.scope:
            while one.write is None and one.outcome is None and not self._may_begin(one):
                await self._changed.wait()
            if one.outcome is None:
                program, exchange, scratch = await self._preparation.begin(one.version)
                with unwrapped():
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(exchange.run, self._send_maxima)
                        sending, started = await self._send(one, program, exchange, scratch)
                        ended = monotonic()
                        if self._codings is not None:
                            used = self._codings.sent(sending.stages.write_s)
                        coded = sum(each.sent_bytes for each in used if each.coding != "full")
                        sent_bytes = sending.stages.bytes + coded
                one.written = True
                await self._channel.send(COORDINATOR, Wrote(one.version, list(used), sent_bytes))
                if self._codings is not None:
                    await self._codings.measure()  # while receivers verify
        while one.outcome is None:
            await self._changed.wait()
        if one.outcome:
            raise BrokenError(
                f"version {one.version} was not committed: {one.outcome}", remedy="publish a later version"
            )
        assert sending is not None and program is not None and scratch is not None
        staged = scratch.staging.highest_bytes if scratch.staging is not None else 0
        now = monotonic()
        return PublishReport(
            one.version,
            now - began,
            started - began,
            ended - started,
            now - ended,
            sending.stages,
            staged,
            tuple(name for name in program.receivers if one.write is not None and name in one.write.receivers),
            used,
            sent_bytes,
        )

    def _may_begin(self, one: Publication) -> bool:
        """Return whether units may be filled before receivers have opened their memory.

        A device that queues has one kind of checksums, others have those of last time. Where cores are few that only
        keeps others from opening it.
        """
        device = self._shards.device
        return one.seated and (device.queues or (device.fills > 1 and self._kind is not None))

    async def _send(
        self, one: Publication, program: Program, exchange: Exchange, scratch: Scratch
    ) -> tuple[WeightSending, float]:
        """Write everything; return with what, and when receivers had opened their memory."""

        def begun(kind: ChecksumKind) -> WeightSending:
            return WeightSending(self._fabric, self._shards, scratch.staging, exchange, one.version, self._post, kind)

        device = self._shards.device
        early_kind = device.checksum if device.queues else self._kind
        sending = begun(early_kind) if early_kind is not None and self._may_begin(one) else None
        with unwrapped():
            async with anyio.create_task_group() as early:
                if sending is not None:
                    one.kind = sending.kind
                    early.start_soon(sending.run, program, scratch.unit_bytes)
                while (here := one.taking_part(program)) is None or not one.gates.keys() >= here:
                    await self._changed.wait()
                started = monotonic()
                one.kind = "words" if "words" in (device.checksum, *one.kinds) else "xxh3"
                gates = {name: one.gates[name] for name in program.receivers if name in here}
                coded = await self._coded(one, program)
                for name in coded.lanes if coded is not None else ():
                    gates.pop(name, None)  # it may be gone already
                if sending is not None and sending.kind == one.kind:
                    sending.open(gates, coded)
                elif sending is not None:
                    early.cancel_scope.cancel()
        if sending is None or sending.kind != one.kind:  # what was filled, if it was, has other checksums
            sending = begun(one.kind)
            sending.open(gates, coded)
            await sending.run(program, scratch.unit_bytes)
        self._kind = one.kind
        return sending, started

    async def _coded(self, one: Publication, program: Program) -> CodedSending | None:
        if self._codings is None:
            return None
        return await self._codings.begin(one.version, program, one.offered_slots, self._post, one.kind)

    # ---- messages

    async def run(self) -> None:
        """Take messages until the channel is closed; not for users.

        Cancellation: at once.
        """
        event: Event
        while True:
            try:
                sender, event = await self._channel.receive()
            except ClosedError as error:
                sender, event = COORDINATOR, PeerLost(str(error))
                self._closed = True
            try:
                self._take_message(sender, event)
            except RemoteProtocolError as error:
                logger.warning("trainer %d: %s", self.rank, error)
                if self._publication is not None:
                    await self._post(COORDINATOR, Failed(self._publication.version, str(error)[:2000]))
            self._changed.notify()
            if self._closed:
                return
            if isinstance(event, PeerLost) and sender != COORDINATOR:
                await self._parted(sender, event.reason)

    def _take_message(self, sender: str, event: Event) -> None:
        one = self._publication
        match event:
            case PeerFound() if sender == COORDINATOR:
                self._here = True
            case PeerLost(reason) if sender == COORDINATOR:
                self._here = False
                if one is not None and one.outcome is None:
                    one.outcome = f"the coordinator is lost, and whether it had decided is not known here: {reason}"
                    one.scope.cancel()
            case Roster():
                self._preparation.seat(event)
                if one is not None and event.version == one.version:
                    one.seated = True
                    one.gone.clear()  # who was lost before takes part if it came back
            case Write() if one is not None and event.version == one.version:
                one.write = event
            case Opened() if one is not None and event.version == one.version:
                one.gates[sender] = gate_of(event)
                one.offered_slots[sender] = event.coded_slots
                one.kinds.add(event.checksum)
                if self._codings is not None:
                    self._codings.opened(sender)
            case Taken() if self._codings is not None:
                self._codings.take(sender, event)
            case Gone(name) if one is not None:
                one.gone.add(name)
                if self._codings is not None:
                    self._codings.lost(name)
            case Maxima():
                self._preparation.take_maxima(sender, event)
            case Abort(version=version, reason=reason) | Outcome(version=version, reason=reason) if (
                one is not None and version == one.version and one.outcome is None
            ):
                one.outcome = reason
                if reason:
                    one.scope.cancel()
            case _:
                pass

    async def _parted(self, name: str, reason: str) -> None:
        """The session with another participant ended: its last messages may be lost, at either end.

        It may be dead, which the coordinator notices by itself; or the link broke, and what is missing would be waited
        for without an end.
        """
        one = self._publication
        if one is None or one.outcome is not None or not self._preparation.needs(name, one.version):
            return
        if "/" in name:
            await self._post(COORDINATOR, Unreachable(one.version, name, f"its session broke: {reason}"[:2000]))
        elif one.seated:
            await self._post(COORDINATOR, Failed(one.version, f"the session with {name} broke: {reason}"[:2000]))

    async def _send_maxima(self, to: int, message: Maxima) -> None:
        while True:  # until the version is over, if there is never a session
            try:
                return await self._channel.send(trainer_name(to), message)
            except PeerError:
                await anyio.sleep(AGAIN_S)

    async def _post(self, to: str, message: WeightMessage) -> None:
        try:
            await self._channel.send(to, message)
        except FabricError as error:  # the coordinator knows of the loss, or will notice it
            logger.info("%s did not get %s of trainer %d: %s", to, type(message).__name__, self.rank, error)


@asynccontextmanager
async def open_publisher(
    fabric: Fabric,
    channel: WeightChannel,
    plan: Plan,
    rank: int,
    shards: ShardMap,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
    codings: Iterable[str] = (),
    coding: Rule = "auto",
    gather: bool = True,
) -> AsyncIterator[WeightPublisher]:
    """Open one trainer's part in updates; its shards are registered once.

    Args:
        fabric: that writes.
        channel: of `trainer_name(rank)`; it is the publisher's to receive from.
        plan: moves and relay; its replicas do not matter, the roster lists who takes part.
        rank: of the trainer.
        shards: by parameter, what this rank holds; see ShardMap.
        scratch_bytes: bound on all memory beyond the shards and beyond what codings need.
        codings: that may be used for receivers that read them: "delta", "exponent". With "delta" what was sent last is
            kept once more while deltas pay, and twice while a version is being sent.
        coding: "auto" uses one where it was measured to be faster than plain bytes; "always" wherever both ends can.
        gather: whether a rail that can may put boxes in order while it writes them; False for replicas in memory of
            their callers, into which none can.

    Raises:
        ValueError: a shard is missing or is not what the plan states; a coding is not known, or wanted for shards on a
            GPU.
        DeviceError: memory cannot be registered.

    Cancellation: what was posted drains (INV-2), the memory is released, then it goes on.
    """
    wanted = known_codings(codings)
    async with open_shards(fabric, plan, rank, shards) as held:
        if wanted and held.device.name != HOST:
            raise ValueError(
                f"codings work in host memory only, and the shards of rank {rank} are on {held.device.name}"
            )
        sender = SenderCodings(fabric, held, trainer_name(rank), wanted, coding) if wanted else None
        # What is coded is read by the trainer anyway, so nothing would be left of it to gather.
        gathered = gather and not wanted and gathers(fabric, held.device)
        preparation = Preparation(fabric, plan, rank, held, scratch_bytes, gathered)
        publisher = WeightPublisher(fabric, channel, rank, held, preparation, sender)
        try:
            async with beside() as tasks:
                tasks.start_soon(publisher.run)
                yield publisher
        finally:
            with anyio.CancelScope(shield=True):
                await preparation.aclose()
                if sender is not None:
                    await sender.aclose()
