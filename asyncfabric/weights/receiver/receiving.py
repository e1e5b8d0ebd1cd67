"""Receiving: one version on its way into a receiver, from opened memory to verified bytes, and passed on to others.

Runs on the event loop's thread. Receivers that get rows from here read re-reports of them like those of a trainer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from asyncfabric import Fabric
from asyncfabric._groups import unwrapped
from asyncfabric.weights.channel import COORDINATOR, WeightChannel, receiver_name
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.messages import Coded, Keys, Opened, Taken, Wrote
from asyncfabric.weights.outbox import Outbox
from asyncfabric.weights.plan.batch import SHARES
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.awaited import RowPlaces
from asyncfabric.weights.receiver.coded_forwarding import CodedForwarding, ForwardCodings
from asyncfabric.weights.receiver.copies import Copy, Fetching
from asyncfabric.weights.receiver.forwarding import Forwarding, ReReports
from asyncfabric.weights.receiver.intake import Intake
from asyncfabric.weights.receiver.slots import Arrivals, SlotMemory
from asyncfabric.weights.writing import gate_of, shares_of


class Arrival:
    """A version on its way.

    Attributes:
        number: which arrival of this receiver; a version that is begun again has another one (WC-7).
        version, scope: of it.
        intake, forwarding, coded, fetching: what takes part, None before or without.
    """

    def __init__(self, number: int, version: int) -> None:
        """Begin with nothing."""
        self.number: int = number
        self.version: int = version
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.intake: Intake | None = None
        self.forwarding: Forwarding | None = None
        self.coded: Arrivals | None = None
        self.fetching: Fetching | None = None

    def take(self, sender: str, message: Opened | Coded | Taken) -> bool:
        """Hand a message of this version on; return whether there was somebody to take it.

        Raises RemoteProtocolError for what is not the sender's to send.
        """
        if isinstance(message, Opened) and self.forwarding is not None:
            self.forwarding.open(
                sender,
                gate_of(message),
                message.coded_slots,
            )
        elif isinstance(message, Coded) and self.coded is not None:
            self.coded.take(sender, message)
        elif isinstance(message, Taken) and self.forwarding is not None and self.forwarding.coded is not None:
            self.forwarding.coded.take(sender, message)
        else:
            return False
        return True


class Participant(NamedTuple):
    """One receiver of a replica, and what it works with; `tasks` outlive versions."""

    fabric: Fabric
    channel: WeightChannel
    plan: Plan
    replica: str
    receiver: int
    tasks: TaskGroup

    @property
    def name(self) -> str:
        """Its name in messages."""
        return receiver_name(self.replica, self.receiver)


class Receiving:
    """How one receiver takes versions; it outlives them."""

    def __init__(
        self, here: Participant, slot_memory: SlotMemory | None, forwards: ForwardCodings | None, outbox: Outbox
    ) -> None:
        """Take coded rows in `slot_memory` and pass some on with `forwards`, if there are."""
        self._here = here
        self._slot_memory = slot_memory
        self._forwards = forwards
        self._outbox = outbox
        self._places: tuple[Plan, RowPlaces] | None = None

    @asynccontextmanager
    async def opened(
        self, arrival: Arrival, plan: Plan, copy: Copy, base: Copy | None
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Open `copy` for a version and send its keys; `base` serves and stays meanwhile.

        Yields, with all that takes messages of the version in place, a function that returns when the version is
        complete and passed on, or raises. On leaving the keys are dead.

        Cancellation: what was opened is revoked, and what was posted drained, shielded.
        """
        if self._places is None or self._places[0] is not plan:
            self._places = (plan, RowPlaces(plan, self._here.receiver, copy.layout))
        places = self._places[1]
        keys = await copy.open()
        intake = Intake(self._here.fabric, plan, places, self._here.replica, copy)
        try:
            async with AsyncExitStack() as ending:
                passing = self._passing(arrival, base, copy, places)
                if passing is not None:
                    ending.push_async_callback(passing.aclose)
                reports = ReReports(arrival.version, self._outbox)
                forwarding = Forwarding(
                    self._here.fabric, plan, self._here.replica, self._here.receiver, copy, reports, passing
                )
                coded = await ending.enter_async_context(self._coded(arrival, base, intake))
                arrival.intake, arrival.forwarding, arrival.coded = intake, forwarding, coded
                self._open_to(arrival.version, keys, intake, coded)
                tasks = await ending.enter_async_context(anyio.create_task_group())

                async def complete() -> None:
                    if coded is not None:
                        tasks.start_soon(coded.run)
                    await self._take(intake, forwarding, coded, reports)
                    if passing is not None and (used := passing.end()):
                        self._outbox.put(COORDINATOR, Wrote(arrival.version, used))  # ahead of what may end the update
                        assert self._forwards is not None
                        self._here.tasks.start_soon(self._forwards.measure, base, copy, places, forwarding.rows)
                    copy.complete(arrival.version, arrival.number)

                yield complete
        finally:
            intake.close()
            with anyio.CancelScope(shield=True):
                await copy.close()

    def _open_to(self, version: int, keys: Keys, intake: Intake, coded: Arrivals | None) -> None:
        share = intake.total_bytes // SHARES
        for name in intake.names:
            coded_slots = coded.offer(name) if coded is not None else None
            opened = Opened(version, keys, intake.imm(name), coded_slots, intake.copy.device.checksum, share)
            self._outbox.put(name, opened)

    async def _take(self, intake: Intake, forwarding: Forwarding, coded: Arrivals | None, reports: ReReports) -> None:
        """Return when all is right, and passed on where somebody wants it."""
        with unwrapped():
            async with anyio.create_task_group() as reporting:
                reports.begin(reporting, shares_of(forwarding.gates, forwarding.bytes_to))
                async with anyio.create_task_group() as forwards:

                    async def forward(rows: list[int], sums: list[int], kind: ChecksumKind) -> None:
                        if forwarding.needed:
                            forwards.start_soon(forwarding.forward, rows, sums, kind)

                    await intake.run(forward)
                    if coded is not None:
                        coded.finish()
                reports.finish()

    def _coded(
        self, arrival: Arrival, base: Copy | None, intake: Intake
    ) -> AbstractAsyncContextManager[Arrivals | None]:
        """Return what takes coded rows of a version."""
        if self._slot_memory is None:
            return nullcontext()
        return self._slot_memory.arrivals(self._here.fabric, arrival.version, base, intake, self._outbox)

    def _passing(self, arrival: Arrival, base: Copy | None, copy: Copy, places: RowPlaces) -> CodedForwarding | None:
        if self._forwards is None:
            return None
        return CodedForwarding(self._forwards, arrival.version, base, copy, places, self._outbox)
