"""Replica: one receiver of weight updates: drives the commit machine, moves bytes, and serves exactly one version.

Runs on the event loop's thread. `step_boundary` is the only place where what serves changes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from asyncfabric import ClosedError, Fabric, FabricError, RemoteProtocolError
from asyncfabric._groups import beside, unwrapped
from asyncfabric.weights.agreement import RosterPlans
from asyncfabric.weights.channel import AGAIN_S, COORDINATOR, Event, Found, Lost, Messenger, receiver_name
from asyncfabric.weights.coding.choice import Coding, Rule, known_codings
from asyncfabric.weights.memory.device import HOST
from asyncfabric.weights.memory.host import device_of
from asyncfabric.weights.memory.rows import TensorLayout, layout_of
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
from asyncfabric.weights.outbox import Pace, Words, receiving_beats
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.catching_up import Fetching, give
from asyncfabric.weights.receiver.coded_forwarding import ForwardCodings
from asyncfabric.weights.receiver.copies import Copy, Serving, open_copies
from asyncfabric.weights.receiver.machine import Discard, Effect, Fetch, Open, State, Tell
from asyncfabric.weights.receiver.receiving import Arrival, Receiving, Stages
from asyncfabric.weights.receiver.refusal import Backoff, Refusal
from asyncfabric.weights.receiver.slots import LANDING_BYTES, LandingMemory, open_landing

logger: logging.Logger = logging.getLogger("asyncfabric.weights")


class WeightReplica(Serving):
    """One receiver; made by `async with open_replica(...)`.

    Attributes:
        name, receiver: which receiver of which replica.
        layout: where its tensors lie in a copy.
        failure: why the last version that could not be received was given up, empty for none.
    """

    def __init__(
        self, fabric: Fabric, messenger: Messenger, plan: Plan, name: str, receiver: int, copies: list[Copy],
        landing: LandingMemory | None, forwards: ForwardCodings | None, tasks: TaskGroup,
    ) -> None:  # fmt: skip
        """Not for users: `async with open_replica(...)`."""
        self._plans = RosterPlans(plan)
        super().__init__(copies, self._plans.geometry)
        self.name: str = name
        self.receiver: int = receiver
        self.layout: TensorLayout = layout_of(plan, receiver)
        self.failure: str = ""
        self._fabric = fabric
        self._messenger = messenger
        self._tasks = tasks
        self._plan: Plan | None = None
        self._plan_version = 0
        self._arrival: Arrival | None = None
        self._early: list[tuple[str, Opened]] = []
        self._turn = anyio.Lock()
        self._pace = Pace()
        self._backoff = Backoff()
        self._words = Words(messenger, f"{name}/{receiver}", self._unsaid)
        self._refusal = Refusal(f"{name}/{receiver}", plan.with_replicas(()), self._report)
        self._receiving = Receiving(fabric, name, receiver, landing, forwards, self._words, tasks)

    @property
    def refusal(self) -> str:
        """Why the coordinator lets this receiver take part in nothing, empty while it does."""
        return self._refusal.reason

    def leave(self) -> None:
        """Begin nothing any more; not for users."""
        self._closed = True

    # ---- messages

    async def run(self) -> None:
        """Take messages until the messenger is closed, and serve on then; not for users.

        Cancellation: what is under way drains.
        """
        self._tasks.start_soon(self._words.run)
        burst: list[tuple[str, Event]] = []
        while True:
            try:
                burst = burst or [await self._messenger.receive()]
            except ClosedError as error:
                logger.info("%s/%d hears of no more updates: %s", self.name, self.receiver, error)
                self._carry_out(self._machine.session_lost())
                return
            burst += self._messenger.take_nowait()
            written: list[tuple[str, Written]] = []
            for sender, event in burst:
                if isinstance(event, Written):
                    written.append((sender, event))
                    continue
                self._take_written(written)
                try:
                    await self._hear(sender, event)
                except RemoteProtocolError as error:
                    self._give_up(str(error))
            more = self._take_written(written)
            burst = await self._pace.listen(self._messenger.take_nowait) if more else []

    def _take_written(self, words: list[tuple[str, Written]]) -> bool:
        """Take what was said together, and forget it; return whether there is more to be written."""
        arrival = self._arrival
        mine = [word for word in words if arrival is not None and word[1].version == arrival.version]
        words.clear()
        if not mine or arrival is None or arrival.intake is None:
            return False
        self._pace.beats_per_s = receiving_beats(len(arrival.intake.names))
        try:
            arrival.intake.take_all(mine)
        except RemoteProtocolError as error:
            self._give_up(str(error))
        return not arrival.intake.all_told

    async def _hear(self, sender: str, event: Event) -> None:
        match event:
            case Found() if sender == COORDINATOR:
                self._refusal.session_began()
                self._report()
            case Refused() if sender == COORDINATOR:
                self._tasks.start_soon(self._refusal.take, event)
            case Lost() if sender == COORDINATOR:
                self._carry_out(self._machine.session_lost())
            case Lost(reason):
                self._source_lost(sender, reason)
                self._parted(sender, reason)
            case Gone(name):
                self._source_lost(name, "the coordinator has lost it")
            case Roster():
                self._plan, self._plan_version = self._plans.plan(event), event.version
            case Prepare() | Commit() | Abort() | CatchUp() if sender == COORDINATOR:
                self._refusal.accepted()
                self._carry_out(self._machine.heard(event))
                arrival = self._arrival
                if isinstance(event, Commit) and arrival is not None and arrival.version == event.version:
                    arrival.scope.cancel()  # whoever is to have it from us has it, or is gone
                self._notify()
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
            self._early.append((sender, message))  # they were faster than we are
            return
        if arrival is None or arrival.version != message.version:
            return  # of a version that is over
        if not arrival.take(sender, message) and isinstance(message, Opened):
            self._early.append((sender, message))

    def _source_lost(self, name: str, reason: str) -> None:
        if self._arrival is not None and self._arrival.fetching is not None:
            self._arrival.fetching.lost(name, reason)

    def _parted(self, name: str, reason: str) -> None:
        """A session ended: what was said last to one that gets rows from here, or by it, may not have been heard."""
        arrival = self._arrival
        if arrival is not None and arrival.forwarding is not None and name in arrival.forwarding.bytes_to:
            self._words.say(COORDINATOR, Unreachable(arrival.version, name, f"its session broke: {reason}"[:2000]))

    # ---- effects

    def _report(self) -> None:
        self._carry_out(self._machine.session_began(self._refusal.differs))

    def _carry_out(self, effects: list[Effect]) -> None:
        if self._closed:
            return
        for effect in effects:
            match effect:
                case Tell(message):
                    self._words.say(COORDINATOR, message)
                case Open() | Fetch():
                    arrival = self._arrival = Arrival(effect.arrival, effect.version)
                    self._tasks.start_soon(self._carry, arrival, effect)
                case Discard():
                    if self._arrival is not None and self._arrival.number == effect.arrival:
                        self._arrival.scope.cancel()
        self._notify()

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
                    what = f"version {arrival.version} cannot be received by {self.name}/{self.receiver}"
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

        def opened() -> None:
            early, self._early = self._early, []
            for sender, message in early:
                self._hand_over(sender, message)
            self._carry_out(self._machine.opened(arrival.number))

        def verified() -> None:
            self._carry_out(self._machine.verified(arrival.number))

        await self._receiving.run(arrival, plan, copy, self._base(), Stages(opened, verified))

    def _base(self) -> Copy | None:
        """Return the copy that serves and stays while another one is filled: what deltas are against."""
        return self._copies[self._serving_copy] if self._serving_copy >= 0 else None

    async def _fetch(self, arrival: Arrival, effect: Fetch, copy: Copy) -> None:
        key = await copy.open()
        try:
            with Fetching(self._fabric, effect.version, effect.source, copy) as fetching:
                arrival.fetching = fetching
                want = Want(effect.version, key.to_bytes(), fetching.imm, copy.device.checksum)
                self._words.say(effect.source, want)
                await fetching.run()
                copy.complete(effect.version, arrival.number)
                self._backoff.reset()
                self._carry_out(self._machine.fetched(arrival.number))
        finally:
            with anyio.CancelScope(shield=True):
                await copy.close()

    def _give_up(self, reason: str, arrival: Arrival | None = None) -> None:
        arrival = arrival or self._arrival
        self.failure = reason
        if arrival is not None:
            self._carry_out(self._machine.failed(arrival.number, reason))
            self._carry_out(self._machine.fetched(arrival.number, reason))

    async def _give(self, to: str, want: Want) -> None:
        held = self._machine.held
        if not held or want.version != held:
            reason = f"{self.name}/{self.receiver} does not hold it, but version {held}"
            self._words.say(to, Given(want.version, want.imm, b"", reason))
            return
        copy = self._copies[self._copy_of(self._machine.held_arrival)]
        with copy.lend():
            self._words.say(to, await give(self._fabric, copy, want))

    def _unsaid(self, to: str, message: WeightMessage, error: FabricError) -> None:
        if isinstance(message, Want):
            fetching = self._arrival.fetching if self._arrival is not None else None
            if fetching is not None and fetching.imm == message.imm:
                fetching.lost(to, str(error))
        elif isinstance(message, Opened):
            self._tasks.start_soon(self._say_again, to, message)

    async def _say_again(self, to: str, message: Opened) -> None:
        await anyio.sleep(AGAIN_S)
        if self._machine.state is State.RECEIVING and self._machine.version == message.version:
            self._words.say(to, message)


@asynccontextmanager
async def open_replica(
    fabric: Fabric, messenger: Messenger, plan: Plan, name: str, receiver: int, *, shadow: bool = True,
    codings: Iterable[str] = (), coding: Rule = "auto", landing_bytes: int = LANDING_BYTES, device: str = HOST,
) -> AsyncIterator[WeightReplica]:  # fmt: skip
    """Open one receiver of a replica: memory for its tensors, and its part in every update.

    Args:
        fabric: that it is reached through.
        messenger: of `receiver_name(name, receiver)`; it is the replica's to receive from.
        plan: moves and relay; its replicas do not matter, the coordinator says who takes part.
        name: of the replica.
        receiver: rank within it.
        shadow: two copies, a version serves while the next one arrives. Else one: steps stop meanwhile.
        codings: that trainers, and receivers that forward to this one, may use: "delta" (with a shadow only),
            "exponent". They do where they measure that it pays; see `open_publisher`. What this one forwards may be in
            the same ones.
        coding: of what it forwards: "auto" uses one where it was measured to be faster, "always" where both ends can.
        landing_bytes: memory for coded rows beside the copies, shared out to those who send in two slots each.
        device: where the tensors are: "cpu", or "cuda:N" of a fabric that has a rail of that GPU; `tensors()` are
            tensors of torch there. Codings are for "cpu" only.

    Raises:
        ValueError: there is no such rank, a coding is not known, or codings are wanted on a GPU.
        DeviceError: no memory left.

    Cancellation: what is under way drains (INV-2), the memory is released, then it goes on.
    """
    if not 0 <= receiver < plan.receivers:
        raise ValueError(f"receiver must be in 0..{plan.receivers - 1}, got {receiver}")
    place = device_of(device)
    wanted = known_codings(codings)
    if wanted and place.name != HOST:
        raise ValueError(f"codings are read in host memory only, and the tensors of {name} are to be on {place.name}")
    reads = wanted - (set() if shadow else {Coding.DELTA})  # in place the base would be overwritten
    async with (
        open_copies(fabric, layout_of(plan, receiver), 2 if shadow else 1, place) as copies,
        open_landing(fabric, reads, landing_bytes) as landing,
        beside() as tasks,
    ):
        forwards = ForwardCodings(fabric, receiver_name(name, receiver), reads, coding) if reads else None
        replica = WeightReplica(fabric, messenger, plan, name, receiver, copies, landing, forwards, tasks)
        tasks.start_soon(replica.run)
        try:
            yield replica
        finally:
            replica.leave()
