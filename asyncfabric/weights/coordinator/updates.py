"""Updates: drives the coordinator of the commit: who takes part, the log, and how updates end.

Runs on the event loop's thread; the log's file calls run on a worker thread, but for a decision on a disk that took the
beginning of the version at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import anyio
from anyio.abc import TaskGroup

from asyncfabric import BrokenError, BusyError, ClosedError, FabricError
from asyncfabric._notice import Notice
from asyncfabric.control import PeerFound, PeerLost
from asyncfabric.weights.agreement import roster_of
from asyncfabric.weights.channel import Event, WeightChannel, receiver_of, trainer_name
from asyncfabric.weights.coordinator.decision import Coordinator, Decide, Effect, Phase, Send
from asyncfabric.weights.coordinator.decision_log import DecisionLog
from asyncfabric.weights.coordinator.participants import Admission, Presence, Proposals, SeatAssignment
from asyncfabric.weights.coordinator.progress import UpdateProgress, UpdateReport
from asyncfabric.weights.messages import (
    Failed,
    Fetched,
    Gone,
    Offered,
    Outcome,
    Reached,
    Ready,
    Standing,
    Stopped,
    Unreachable,
    Verified,
    Wrote,
)
from asyncfabric.weights.outbox import QUICK_BATCHES_PER_S, BatchingInterval, Outbox
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.threads import in_thread

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

GRACE_S = 5.0
"""How long a receiver that cannot be written to may take to be known as dead, before it fails the update; and so long
the report of a decided update waits for a trainer whose writes have not all ended, such as those to a dead receiver."""

AT_ONCE_S = 0.002
"""A disk that took the beginning of a version so soon takes its decision without a thread, the way to which would take
longer: should the disk take longer this once, the event loop waits."""


class Updates:
    """The updates that a coordinator drives, one at a time.

    Attributes:
        trainers: names of all ranks of the plan.
        machine: the coordinator of the commit.
        log: of decisions.
        proposals: of trainers.
        admission: of receivers.
        absent: the trainers that have no session with the coordinator, and since when, on time.monotonic().
        presence: what was seen of each name.
        changed: notified with each change of these.
    """

    def __init__(
        self,
        channel: WeightChannel,
        plan: Plan,
        log: DecisionLog,
        tasks: TaskGroup,
        grace_s: float = GRACE_S,
        keep: bool = True,
    ) -> None:
        """Begin with what the log has; no participant is there. `keep` as for Coordinator."""
        self.trainers: tuple[str, ...] = tuple(trainer_name(rank) for rank in range(plan.trainers))
        self.log: DecisionLog = log
        self.machine: Coordinator = Coordinator(
            begun=log.begun,
            committed=log.committed,
            seat=lambda name: receiver_of(name)[1],
            engine=lambda name: receiver_of(name)[0],
            keep=keep,
        )
        self.proposals: Proposals = Proposals(self.trainers)
        self.admission: Admission = Admission(plan.with_replicas(()))
        self.absent: dict[str, float] = dict.fromkeys(self.trainers, monotonic())
        self.presence: dict[str, Presence] = {}
        self.changed: Notice = Notice()
        self._channel = channel
        self._tasks = tasks
        self._grace_s = grace_s
        self._seats = SeatAssignment(plan)
        self._here: set[str] = set()
        self._update: UpdateProgress | None = None
        self._ranks = frozenset(self.trainers)
        self._interval = BatchingInterval(QUICK_BATCHES_PER_S)
        self._outbox = Outbox(channel, "the coordinator", quiet=self._all_sent)

    @property
    def begun(self) -> int:
        """The latest version that was begun, also one that nobody was there for. The next is later."""
        return max(self.log.begun, self.machine.begun)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Who the open update waits for."""
        if self._update is not None and self.machine.phase is Phase.WRITING:
            return (*sorted(set(self.trainers) - self._update.wrote), *self.machine.awaited)
        return self.machine.awaited

    async def update(self, version: int) -> UpdateReport:
        """Bring a version to every receiver that is there, or to none; see `WeightCoordinator.update`.

        Cancellation: the update is aborted, unless it is being decided.
        """
        if version <= self.begun:
            reason = f"version must be greater than {self.begun}, got {version}"
            self._refuse(version, reason)
            raise ValueError(reason)
        if self._update is not None:
            raise BusyError(f"the update to version {self._update.version} is open")
        while self.proposals.agreed != version:
            await self.changed.wait()
        update = self._update = UpdateProgress(version)
        try:
            if self.machine.stoppable:
                await in_thread(self.log.begin, version, self._seats.geometry)
                self._begin(update, logged=True)
            else:  # receivers open their memory meanwhile; senders get Write when it is on the disk (WC-6)
                self._begin(update, logged=False)
                await in_thread(self.log.begin, version, self._seats.geometry)
                self._carry_out(self.machine.logged(version))
                self._settle()
            await update.done.wait()
        except BaseException as error:
            if not update.done.is_set():
                self._carry_out(self.machine.sender_failed(self.trainers[0], f"the coordinator gave up: {error!r}"))
                if self.machine.phase is Phase.DECIDING:
                    with anyio.CancelScope(shield=True):
                        await update.done.wait()
                update.failure = update.failure or str(error)
            self._send_outcome(update)
            self._end(update)
            if isinstance(error, (FabricError, ValueError)):
                raise BrokenError(f"version {version} was not committed: {error}") from error
            raise
        self._send_outcome(update)
        try:
            if not update.failure:
                await self._await_reports(update)
        finally:
            self._end(update)
        if update.failure:
            raise BrokenError(f"version {version} was not committed: {update.failure}", remedy="the old one serves")
        return update.report()

    # ---- one update

    def _begin(self, update: UpdateProgress, *, logged: bool) -> None:
        """State who takes part, and open the update; nothing waits between the two."""
        if self.proposals.agreed != update.version:
            raise BrokenError("a trainer withdrew it before it began")
        present = self.machine.invited
        if not present or not set(self.trainers) <= self._here:
            gone = sorted(set(self.trainers) - self._here)
            lacking = [*gone, *([] if present else ["a receiver"])]
            raise BrokenError(f"an update needs all trainers and a receiver; not there: {', '.join(lacking)}")
        if self.machine.endangered:
            raise BrokenError(
                self.machine.endangered,
                remedy="start a receiver with a shadow for each rank of the replicas; nobody has stopped serving",
            )
        plan, forwards = self._seats.plan(present)
        roster = roster_of(plan, update.version, forwards)
        for name in (*present, *self.trainers):  # those have to open their memory
            self._outbox.put(name, roster)
        update.receivers = tuple(sorted(present))
        self._carry_out(
            self.machine.begin(
                update.version,
                self._seats.geometry,
                [*self.trainers, *(present if forwards else ())],
                logged=logged,
            )
        )

    def unprepared(self, version: int) -> tuple[bool, tuple[str, ...]]:
        """Return whether an engine has opened its memory for a version, and the receivers that have not yet."""
        update = self._update
        if update is None or update.version != version or self.machine.begun < version:
            return self.machine.committed >= version, ()
        waits = self.machine.awaited if self.machine.phase is Phase.PREPARING else ()
        return {receiver_of(name)[0] for name in waits} < {receiver_of(name)[0] for name in update.receivers}, waits

    def leave_out(self, version: int, names: Iterable[str], reason: str) -> None:
        """Go on with a version without the engines of these receivers; see `Coordinator.leave_out`."""
        update = self._update
        if update is not None and update.version == version:
            self._carry_out(self.machine.leave_out(names, reason))
            update.receivers = tuple(sorted(set(update.receivers) - self.machine.late))
            self._settle()

    async def _await_reports(self, update: UpdateProgress) -> None:
        """Wait a while for reports of trainers about a decided version: it may be verified before they come."""
        with anyio.move_on_after(self._grace_s):
            while not update.wrote | update.silent >= self._ranks:
                await self.changed.wait()

    def _end(self, update: UpdateProgress) -> None:
        if self._update is update:
            self._update = None
        self.changed.notify()

    def _send_outcome(self, update: UpdateProgress) -> None:
        self.proposals.take_down(update.version)
        outcome = Outcome(update.version, update.failure[:2000])
        for trainer in self.trainers:
            if trainer in self._here:
                self._outbox.put(trainer, outcome)
        self.changed.notify()

    async def wait_trainers_informed(self) -> None:
        """Return when the outcomes of ended updates have left for all trainers; see `WeightCoordinator`.

        Cancellation: only this wait ends.
        """
        await self._outbox.wait_sent(self.trainers)

    # ---- messages

    async def run(self) -> None:
        """Take messages until the channel is closed.

        Cancellation: at once.
        """
        self._tasks.start_soon(self._outbox.run)
        burst: list[tuple[str, Event]] = []
        while True:
            try:
                burst = burst or [await self._channel.receive()]
            except ClosedError as error:
                self._carry_out(self.machine.sender_failed(self.trainers[0], str(error)))
                if self._update is not None:
                    self._update.silent.update(self._ranks)
                self._settle()
                return
            for sender, event in (*burst, *self._channel.take_nowait()):
                self._take_message(sender, event)
                self._follow()
            self.changed.notify()  # once for all: who waits looks at everything anew
            burst = await self._interval.gather(self._channel.take_nowait)

    def _take_message(self, sender: str, event: Event) -> None:
        update = self._update
        match event:
            case PeerFound():
                logger.info("%s is here", sender)
                self._here.add(sender)
                seen = self.presence.get(sender, Presence())
                self.presence[sender] = replace(seen, found=seen.found + 1, here=True)
                self.absent.pop(sender, None)
            case PeerLost(reason):
                self._lost(sender, reason)
            case Offered(version):
                self.proposals.make(sender, version)
                if version <= self.begun:
                    self._refuse(version, f"version must be greater than {self.begun}, got {version}")
            case Wrote(version, codings, sent_bytes) if update is not None and version == update.version:
                update.wrote.add(sender)
                update.codings += codings
                update.sent_bytes += sent_bytes
            case Unreachable(version, receiver, reason) if update is not None and version == update.version:
                self._tasks.start_soon(self._doubt, update, receiver, f"{sender} cannot write to it: {reason}")
            case Failed(version, reason) if sender in self._ranks:
                self.proposals.withdraw(sender, version)
                if update is not None and version == update.version:
                    update.silent.add(sender)
                    self._carry_out(self.machine.sender_failed(sender, reason))
            case Standing() if sender not in self._ranks:
                self._stands(sender, event)
            case Stopped() | Reached() | Ready() | Verified() | Failed() | Fetched() if sender not in self._ranks:
                self._carry_out(self.machine.received(sender, event))
            case _:
                pass

    def _stands(self, receiver: str, standing: Standing) -> None:
        """Let a receiver take part, or refuse it; the open update and later ones go on without it."""
        seen = self.presence.get(receiver, Presence())
        self.presence[receiver] = replace(seen, sessions=seen.sessions + 1)
        refused = self.admission.judge(receiver, standing)
        if refused is None:
            self._carry_out(self.machine.received(receiver, standing))
            return
        if receiver in self.machine.receivers:
            self._carry_out(self.machine.receiver_lost(receiver, refused.reason))
        self._outbox.put(receiver, refused)

    def _lost(self, name: str, reason: str) -> None:
        logger.info("%s is gone: %s", name, reason)
        self.admission.forget(name)
        self._here.discard(name)
        self.presence[name] = replace(self.presence.get(name, Presence()), here=False)
        if name in self._ranks:
            self.absent[name] = monotonic()
        self.proposals.withdraw(name)
        if self._update is not None:
            self._update.silent.add(name)
        if name in self.machine.receivers:
            self._carry_out(self.machine.receiver_lost(name, reason))
        self._carry_out(self.machine.sender_failed(name, reason))
        gone = Gone(name)
        for other in (*self.machine.receivers, *(trainer for trainer in self.trainers if trainer in self._here)):
            self._outbox.put(other, gone)

    async def _doubt(self, update: UpdateProgress, receiver: str, reason: str) -> None:
        """Fail an update for a receiver that cannot be written to, unless it turns out to be dead."""
        with anyio.move_on_after(self._grace_s):
            while receiver in self.machine.receivers and self._update is update:
                await self.changed.wait()
        if self._update is update and receiver in self.machine.receivers:
            self._carry_out(self.machine.received(receiver, Failed(update.version, reason[:2000])))
            self._settle()

    def refuse_offers(self, reason: str) -> None:
        """Refuse every version that is offered; see `WeightCoordinator.refuse_offers`."""
        open_version = self._update.version if self._update is not None else 0
        for version in self.proposals.versions - {open_version}:
            self._refuse(version, reason)

    def _refuse(self, version: int, reason: str) -> None:
        for trainer in self.proposals.take_down(version):
            self._outbox.put(trainer, Outcome(version, reason))
        self.changed.notify()

    def _all_sent(self) -> None:
        if self._update is not None and self.machine.phase in (Phase.WRITING, Phase.DECIDING):
            self._update.mark("sent")

    # ---- effects

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._outbox.put(to, message)
                case Decide(version) if self.log.took_s < AT_ONCE_S:
                    self._settle()
                    with self._deciding(version):
                        self.log.commit(version)
                    self._settle()
                case Decide(version):
                    self._tasks.start_soon(self._decide, version)
        if effects:
            self.changed.notify()

    async def _decide(self, version: int) -> None:
        with self._deciding(version), anyio.CancelScope(shield=True):  # what may be on the disk, the machine must know
            await in_thread(self.log.commit, version)
        self._settle()

    @contextmanager
    def _deciding(self, version: int) -> Iterator[None]:
        """Report to the machine how putting the decision on the disk ends."""
        try:
            yield
        except FabricError as error:
            logger.error("version %d: %s", version, error)
            self._carry_out(self.machine.not_recorded(version, str(error)))
        except BaseException as error:  # what is on the disk is not known: this coordinator must send no more
            if self._update is not None:
                self._update.failure = f"the coordinator broke while it decided: {error!r}"
                self._update.done.set()
            raise
        else:
            self._carry_out(self.machine.recorded(version))

    def _settle(self) -> None:
        """Note how far the open update is, and wake who waits for its end."""
        if self._update is not None:
            self._follow()
            self.changed.notify()

    def _follow(self) -> None:
        if self._update is not None:
            self._update.follow(self.machine, self._ranks)
