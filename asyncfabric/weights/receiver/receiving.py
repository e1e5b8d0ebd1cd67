"""Receiving: one version on its way into a receiver, from opened memory to verified bytes, and passed on to others.

Runs on the event loop's thread. Receivers that get rows from here read re-reports of them like those of a trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from asyncfabric import Fabric, FabricError, RegionKey
from asyncfabric._groups import unwrapped
from asyncfabric.weights.channel import COORDINATOR
from asyncfabric.weights.coding.lane import Failed
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.messages import Coded, Opened, Taken, Unreachable, Wrote
from asyncfabric.weights.outbox import Words
from asyncfabric.weights.plan.batch import SHARES, Share
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.awaited import RowPlaces
from asyncfabric.weights.receiver.catching_up import Fetching
from asyncfabric.weights.receiver.coded_forwarding import CodedForwarding, ForwardCodings
from asyncfabric.weights.receiver.copies import Copy
from asyncfabric.weights.receiver.forwarding import Forwarding
from asyncfabric.weights.receiver.intake import Intake
from asyncfabric.weights.receiver.slots import Arrivals, LandingMemory
from asyncfabric.weights.writing import Gate, Tell, Teller, rows_told, shares_of


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

        Raises RemoteProtocolError for what is not the sender's to say.
        """
        if isinstance(message, Opened) and self.forwarding is not None:
            self.forwarding.open(
                sender, Gate(RegionKey.from_bytes(message.key), message.imm, message.share_bytes), message.landing
            )
        elif isinstance(message, Coded) and self.coded is not None:
            self.coded.take(sender, message)
        elif isinstance(message, Taken) and self.forwarding is not None and self.forwarding.coded is not None:
            self.forwarding.coded.take(sender, message)
        else:
            return False
        return True


class Retelling:
    """What one receiver says of one version that it passes on."""

    def __init__(self, version: int, words: Words) -> None:
        """Say it with these words."""
        self._version = version
        self._words = words
        self._tellers: dict[ChecksumKind, Teller] = {}  # each trainer's checksums travel along, of its kind
        self._tasks: TaskGroup | None = None
        self._share_of: Callable[[str], Share | None] | None = None

    def begin(self, tasks: TaskGroup, share_of: Callable[[str], Share | None]) -> None:
        """Tell by tasks of this group, which ends after `finish`."""
        self._tasks = tasks
        self._share_of = share_of

    def add(self, receiver: str, rows: list[int], sums: list[int], sizes: list[int], kind: ChecksumKind) -> None:
        """Note rows of a receiver that are written, their checksums and bytes."""
        teller = self._tellers.get(kind)
        if teller is None:
            assert self._tasks is not None
            teller = self._tellers[kind] = Teller(self._tell_of(kind), self._share_of)
            self._tasks.start_soon(teller.run)
        for row, checksum, size in zip(rows, sums, sizes, strict=True):
            teller.add(receiver, row, checksum, size)

    def finish(self) -> None:
        """Say that everything is passed on: what is left is told at once."""
        for teller in self._tellers.values():
            teller.finish()

    def _tell_of(self, kind: ChecksumKind) -> Tell:
        async def tell(receiver: str, rows: list[int], sums: list[int], after: int) -> None:
            for message in rows_told(self._version, rows, sums, kind, after):
                self._words.say(receiver, message)

        return tell


class Stages(NamedTuple):
    """What is called when a version can come, with all that takes its messages in place, and when all of it is here."""

    opened: Callable[[], None]
    verified: Callable[[], None]


class Receiving:
    """How one receiver takes versions; it outlives them."""

    def __init__(
        self, fabric: Fabric, name: str, receiver: int, landing: LandingMemory | None,
        forwards: ForwardCodings | None, words: Words, tasks: TaskGroup,
    ) -> None:  # fmt: skip
        """Take coded rows in `landing` and pass some on with `forwards`, if there are; `tasks` measure codings."""
        self._fabric = fabric
        self._name = name
        self._receiver = receiver
        self._landing = landing
        self._forwards = forwards
        self._words = words
        self._tasks = tasks
        self._places: tuple[Plan, RowPlaces] | None = None

    async def run(self, arrival: Arrival, plan: Plan, copy: Copy, base: Copy | None, stages: Stages) -> None:
        """Return when a version is complete in `copy` and passed on, or raise; `base` serves and stays meanwhile.

        Cancellation: what was opened is revoked, and what was posted drained, shielded.
        """
        if self._places is None or self._places[0] is not plan:
            self._places = (plan, RowPlaces(plan, self._receiver))
        places = self._places[1]
        key = await copy.open()
        intake = Intake(self._fabric, plan, places, self._name, copy)
        try:
            async with AsyncExitStack() as ending:
                passing = self._passing(arrival, base, copy, places)
                if passing is not None:
                    ending.push_async_callback(passing.aclose)
                retelling = Retelling(arrival.version, self._words)
                forwarding = self._forwarding(arrival.version, plan, copy, passing, retelling)
                coded = await ending.enter_async_context(self._coded(arrival, base, copy, intake, places))
                arrival.intake, arrival.forwarding, arrival.coded = intake, forwarding, coded
                self._open_to(arrival.version, key, intake, coded, copy)
                stages.opened()
                tasks = await ending.enter_async_context(anyio.create_task_group())
                if coded is not None:
                    tasks.start_soon(coded.run)
                await self._take(intake, forwarding, coded, retelling)
                if passing is not None and (reports := passing.end()):
                    self._words.say(COORDINATOR, Wrote(arrival.version, reports))  # ahead of what may end the update
                    assert self._forwards is not None
                    self._tasks.start_soon(self._forwards.measure, base, copy, places, forwarding.rows)
                copy.complete(arrival.version, arrival.number)
                stages.verified()
        finally:
            intake.close()
            with anyio.CancelScope(shield=True):
                await copy.close()

    def _open_to(self, version: int, key: RegionKey, intake: Intake, coded: Arrivals | None, copy: Copy) -> None:
        told, share = key.to_bytes(), intake.total_bytes // SHARES
        for name in intake.names:
            landing = coded.offer(name) if coded is not None else None
            opened = Opened(version, told, intake.imm(name), landing, copy.device.checksum, share)
            self._words.say(name, opened)

    async def _take(self, intake: Intake, forwarding: Forwarding, coded: Arrivals | None, retelling: Retelling) -> None:
        """Return when all is right, and passed on where somebody wants it."""
        with unwrapped():
            async with anyio.create_task_group() as tellers:
                retelling.begin(tellers, shares_of(forwarding.gates, forwarding.bytes_to))
                async with anyio.create_task_group() as forwards:

                    async def forward(rows: list[int], sums: list[int], kind: ChecksumKind) -> None:
                        if forwarding.needed:
                            forwards.start_soon(forwarding.forward, rows, sums, kind)

                    await intake.run(forward)
                    if coded is not None:
                        coded.finish()
                retelling.finish()

    def _coded(
        self, arrival: Arrival, base: Copy | None, into: Copy, intake: Intake, places: RowPlaces
    ) -> AbstractAsyncContextManager[Arrivals | None]:
        """Return what takes coded rows of a version."""
        if self._landing is None:
            return nullcontext()
        return self._landing.arrivals(self._fabric, arrival.version, base, into, intake, places, self._words.say)

    def _passing(
        self, arrival: Arrival, base: Copy | None, copy: Copy, places: RowPlaces
    ) -> CodedForwarding | None:  # fmt: skip
        if self._forwards is None:
            return None

        async def tell(receiver: str, message: Coded) -> None:
            self._words.say(receiver, message)

        version = arrival.version
        return CodedForwarding(self._forwards, version, base, copy, places, tell, self._unreachable(version))

    def _forwarding(
        self, version: int, plan: Plan, copy: Copy, passing: CodedForwarding | None, retelling: Retelling
    ) -> Forwarding:
        return Forwarding(
            self._fabric, plan, self._name, self._receiver, copy, retelling.add, self._unreachable(version), passing
        )

    def _unreachable(self, version: int) -> Failed:
        async def unreachable(receiver: str, error: FabricError) -> None:
            self._words.say(COORDINATOR, Unreachable(version, receiver, str(error)[:2000]))

        return unreachable
