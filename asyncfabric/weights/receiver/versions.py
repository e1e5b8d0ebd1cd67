"""Versions: drives the commit machine of one receiver: takes messages, moves bytes, and knows the copy that serves.

Runs on the event loop's thread. `flip` is the only place where what serves changes (WC-5).
"""

from __future__ import annotations

import logging

import anyio

from asyncfabric import BrokenError, ClosedError, FabricError, InternalError, RemoteProtocolError
from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric.control import PeerFound, PeerLost
from asyncfabric.weights.agreement import RosterPlans
from asyncfabric.weights.channel import AGAIN_S, COORDINATOR, Event
from asyncfabric.weights.messages import (
    Abort,
    CatchUp,
    Coded,
    Commit,
    Given,
    Gone,
    Opened,
    Prepare,
    Refused,
    Roster,
    Taken,
    Unreachable,
    Want,
    WeightMessage,
    Written,
)
from asyncfabric.weights.outbox import BatchingInterval, Outbox, receiving_rate
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.coded_forwarding import ForwardCodings
from asyncfabric.weights.receiver.copies import Copy, Fetching, give
from asyncfabric.weights.receiver.machine import Discard, Effect, Fetch, Open, Receiver, Report, State
from asyncfabric.weights.receiver.receiving import Arrival, Participant, Receiving
from asyncfabric.weights.receiver.refusal import Backoff, Refusal
from asyncfabric.weights.receiver.slots import SlotMemory

logger: logging.Logger = logging.getLogger("asyncfabric.weights")


class Versions:
    """The versions that come to one receiver, in turn, and the one of its copies that serves.

    Attributes:
        copies: of its tensors.
        serving, serving_copy: the version that serves, 0 for none, and which of `copies` has it, -1 for none.
        machine: the receiver of the commit.
        refusal: the standing with the coordinator.
        failure: why the last version that could not be received was given up, empty for none.
        ended: why no more updates come, empty while they may.
        changed: notified with each change of these.
    """

    def __init__(
        self,
        here: Participant,
        copies: list[Copy],
        slot_memory: SlotMemory | None,
        forwards: ForwardCodings | None,
        paused: bool = True,
    ) -> None:
        """Serve nothing yet. Unless `paused` the one copy is the caller's, and opened while it waits in `arrived`."""
        self._plans = RosterPlans(here.plan)
        self.copies: list[Copy] = copies
        self.machine: Receiver = Receiver(in_place=len(copies) == 1, paused=paused, manifest=self._plans.geometry)
        self.serving: int = 0
        self.serving_copy: int = -1
        self.failure: str = ""
        self._cut_off = ""  # why, where the coordinator stated it
        self.changed: Notice = Notice()
        self.refusal: Refusal = Refusal(here.name, here.plan.with_replicas(()), self._report)
        self._here = here
        self._channel = here.channel
        self._tasks = here.tasks
        self._closed = False
        self.ended: str = ""
        self._plan: Plan | None = None
        self._plan_version = 0
        self._arrival: Arrival | None = None
        self._early: list[tuple[str, Opened]] = []
        self._turn = anyio.Lock()
        self._interval = BatchingInterval()
        self._backoff = Backoff()
        self._outbox = Outbox(here.channel, here.name, self._unsent)
        self._receiving = Receiving(here, slot_memory, forwards, self._outbox)

    def leave(self) -> None:
        """Begin nothing any more."""
        self._closed = True

    def flip(self) -> None:
        """Let what is decided serve (WC-5), and overwrite what waits for it, while no step reads the tensors.

        Raises:
            ClosedError: the replica was left, and its memory with it.
            InternalError: what was decided is in no copy. What served before serves on.
        """
        if self._closed:
            raise ClosedError("this replica was left, and its memory is released", remedy="step within `open_replica`")
        coming = self._copy_of(self.machine.held_arrival)  # before anything changes
        effects = self.machine.flip()
        serving = self.machine.serving
        if serving != self.serving:
            self.serving = serving
            self.serving_copy = coming if serving else -1
            self.changed.notify()
        self._carry_out(effects)

    @property
    def coming(self) -> int:
        """In place: a version that waits for the caller, 0 for none."""
        decided = self.machine.state is State.COMMITTED
        return self.machine.coming if decided or not self.ended else 0

    async def arrived(self) -> None:
        """In place, after `flip`: return once what it let in serves, or nothing came; the memory is closed then.

        Raises:
            BrokenError: the version was cut off; nothing serves.
            ClosedError, InternalError: as `flip`.

        Cancellation: only this wait ends; what was let in goes on.
        """
        version = 0
        while True:
            while self.machine.under_way and not self.ended:
                version = self.machine.version
                await self.changed.wait()
            if self.machine.under_way:  # and nobody will answer any more
                self._give_up(self.ended)
            async with self._turn:  # what was cut off has taken back its keys
                pass
            if not self.machine.under_way:
                break
        if self.machine.state is State.COMMITTED:
            self.flip()
        self.machine.resume()
        if version and not self.serving:
            raise BrokenError(
                f"version {version} was cut off while it was written into the tensors of {self._here.name}, which hold "
                f"parts of several versions now: {self._cut_off or self.failure or 'its sender is lost'}",
                remedy="compute nothing with them until the next version is whole: wait for it and let it in",
            )

    def _copy_of(self, arrival: int) -> int:
        """Return the number of the copy that an arrival completed, -1 for no arrival."""
        if not arrival:
            return -1
        for number, copy in enumerate(self.copies):
            if copy.arrival == arrival:
                return number
        have = [(copy.version, copy.arrival) for copy in self.copies]
        raise InternalError(
            f"version {self.machine.held} came with arrival {arrival}, but the copies hold (version, arrival) {have}",
            remedy="this is a defect of asyncfabric; please report it with this text",
        )

    # ---- messages

    async def run(self) -> None:
        """Take messages until the channel is closed, and serve on then.

        Cancellation: what is under way drains.
        """
        self._tasks.start_soon(self._outbox.run)
        burst: list[tuple[str, Event]] = []
        while True:
            try:
                burst = burst or [await self._channel.receive()]
            except ClosedError as error:
                logger.info("%s receives no more updates: %s", self._here.name, error)
                self.ended = str(error)
                self._carry_out(self.machine.session_lost())
                self.changed.notify()
                return
            burst += self._channel.take_nowait()
            written: list[tuple[str, Written]] = []
            for sender, event in burst:
                if isinstance(event, Written):
                    written.append((sender, event))
                    continue
                self._take_written(written)
                try:
                    await self._take_message(sender, event)
                except RemoteProtocolError as error:
                    self._give_up(str(error))
            more = self._take_written(written)
            burst = await self._interval.gather(self._channel.take_nowait) if more else []

    def _take_written(self, reports: list[tuple[str, Written]]) -> bool:
        """Take what was reported together, and forget it; return whether there is more to be written."""
        arrival = self._arrival
        mine = [report for report in reports if arrival is not None and report[1].version == arrival.version]
        reports.clear()
        if not mine or arrival is None or arrival.intake is None:
            return False
        self._interval.batches_per_s = receiving_rate(len(arrival.intake.names))
        try:
            arrival.intake.take_all(mine)
        except RemoteProtocolError as error:
            self._give_up(str(error))
        return not arrival.intake.all_reported

    async def _take_message(self, sender: str, event: Event) -> None:
        match event:
            case PeerFound() if sender == COORDINATOR:
                self.refusal.session_began()
                self._report()
            case Refused() if sender == COORDINATOR:
                self._tasks.start_soon(self.refusal.take, event)
            case PeerLost(reason) if sender == COORDINATOR:
                self._cut_off = f"the training's coordinator is lost, and nobody decides about it: {reason}"
                self._carry_out(self.machine.session_lost())
            case PeerLost(reason):
                self._source_lost(sender, reason)
                self._parted(sender, reason)
            case Gone(name):
                self._source_lost(name, "the coordinator has lost it")
            case Roster():
                self._plan, self._plan_version = self._plans.plan(event), event.version
            case Prepare() | Commit() | Abort() | CatchUp() if sender == COORDINATOR:
                self.refusal.accepted()
                self._cut_off = event.reason if isinstance(event, Abort) else ""
                self._carry_out(self.machine.received(event))
                arrival = self._arrival
                if isinstance(event, Commit) and arrival is not None and arrival.version == event.version:
                    arrival.scope.cancel()  # whoever is to have it from us has it, or is gone
                self.changed.notify()
            case Opened() | Coded() | Taken():
                self._hand_over(sender, event)
            case Want():
                self._tasks.start_soon(self._give, sender, event)
            case Given():
                if self._arrival is not None and self._arrival.fetching is not None:
                    self._arrival.fetching.take(sender, event)
            case _:
                pass

    def _hand_over(self, sender: str, message: Opened | Coded | Taken) -> None:
        arrival = self._arrival
        if isinstance(message, Opened) and (arrival is None or arrival.version < message.version):
            self._early.append((sender, message))  # they were faster
            return
        if arrival is None or arrival.version != message.version:
            return  # of a version that is over
        if not arrival.take(sender, message) and isinstance(message, Opened):
            self._early.append((sender, message))

    def _source_lost(self, name: str, reason: str) -> None:
        if self._arrival is not None and self._arrival.fetching is not None:
            self._arrival.fetching.lost(name, reason)

    def _parted(self, name: str, reason: str) -> None:
        """A session ended: the last messages to one that gets rows from here, or by it, may be lost."""
        arrival = self._arrival
        if arrival is not None and arrival.forwarding is not None and name in arrival.forwarding.bytes_to:
            self._outbox.put(COORDINATOR, Unreachable(arrival.version, name, f"its session broke: {reason}"[:2000]))

    # ---- effects

    def _free_copy(self) -> Copy:
        """Return the copy that does not serve; in place the machine asks for it when nothing does."""
        return next(copy for number, copy in enumerate(self.copies) if number != self.serving_copy)

    def _report(self) -> None:
        self._carry_out(self.machine.session_began(self.refusal.differs))

    def _carry_out(self, effects: list[Effect]) -> None:
        if self._closed:
            return
        for effect in effects:
            match effect:
                case Report(message):
                    self._outbox.put(COORDINATOR, message)
                case Open() | Fetch():
                    arrival = self._arrival = Arrival(effect.arrival, effect.version)
                    self._tasks.start_soon(self._carry, arrival, effect)
                case Discard():
                    if self._arrival is not None and self._arrival.number == effect.arrival:
                        self._arrival.scope.cancel()
        self.changed.notify()

    async def _carry(self, arrival: Arrival, effect: Open | Fetch) -> None:
        with arrival.scope:  # one that is dropped waits for no turn
            async with self._turn:
                try:
                    copy = self._free_copy()
                    with unwrapped():
                        if isinstance(effect, Open):
                            await self._receive(arrival, effect, copy)
                        else:
                            await self._fetch(arrival, effect, copy)
                except FabricError as error:
                    what = f"version {arrival.version} cannot be received by {self._here.name}"
                    logger.warning("%s: %s", what, error)
                    self.failure = str(error)
                    if isinstance(effect, Fetch):  # the coordinator names a source again at once
                        await anyio.sleep(self._backoff.next_s())
                    self._give_up(str(error), arrival)

    async def _receive(self, arrival: Arrival, effect: Open, copy: Copy) -> None:
        plan = self._plan
        if effect.manifest != self._plans.geometry:
            raise RemoteProtocolError(
                f"version {effect.version} is of plan {effect.manifest}, this receiver has {self._plans.geometry}",
                remedy="all participants must be given the same moves and the same chunk_bytes",
            )
        if plan is None or self._plan_version != effect.version:
            have = f"that of version {self._plan_version}" if plan is not None else "none"
            raise RemoteProtocolError(
                f"the roster of version {effect.version}, which lists its replicas, did not arrive here before the "
                f"version began: the last roster here is {have}",
                remedy="publish a later version; if it repeats, check the link to the coordinator",
            )

        async with self._receiving.opened(arrival, plan, copy, self._base()) as complete:
            early, self._early = self._early, []
            for sender, message in early:
                self._hand_over(sender, message)
            self._carry_out(self.machine.opened(arrival.number))
            await complete()
            self._carry_out(self.machine.verified(arrival.number))

    def _base(self) -> Copy | None:
        """Return the copy that serves and stays while another one is filled: what deltas are against."""
        return self.copies[self.serving_copy] if self.serving_copy >= 0 else None

    async def _fetch(self, arrival: Arrival, effect: Fetch, copy: Copy) -> None:
        keys = await copy.open()
        try:
            with Fetching(self._here.fabric, effect.version, effect.source, copy) as fetching:
                arrival.fetching = fetching
                want = Want(effect.version, keys, fetching.imm, copy.device.checksum)
                self._outbox.put(effect.source, want)
                await fetching.run()
                copy.complete(effect.version, arrival.number)
                self._backoff.reset()
                self._carry_out(self.machine.fetched(arrival.number))
        finally:
            with anyio.CancelScope(shield=True):
                await copy.close()

    def _give_up(self, reason: str, arrival: Arrival | None = None) -> None:
        arrival = arrival or self._arrival
        self.failure = reason
        if arrival is not None:
            self._carry_out(self.machine.failed(arrival.number, reason))
            self._carry_out(self.machine.fetched(arrival.number, reason))

    async def _give(self, to: str, want: Want) -> None:
        held = self.machine.held
        if not held or want.version != held:
            reason = f"{self._here.name} does not hold it, but version {held}"
            self._outbox.put(to, Given(want.version, want.imm, b"", reason))
            return
        copy = self.copies[self._copy_of(self.machine.held_arrival)]
        with copy.lend():
            self._outbox.put(to, await give(self._here.fabric, copy, want))

    def _unsent(self, to: str, message: WeightMessage, error: FabricError) -> None:
        if isinstance(message, Want):
            fetching = self._arrival.fetching if self._arrival is not None else None
            if fetching is not None and fetching.imm == message.imm:
                fetching.lost(to, str(error))
        elif isinstance(message, Opened):
            self._tasks.start_soon(self._send_again, to, message)

    async def _send_again(self, to: str, message: Opened) -> None:
        await anyio.sleep(AGAIN_S)
        if self.machine.state is State.RECEIVING and self.machine.version == message.version:
            self._outbox.put(to, message)
