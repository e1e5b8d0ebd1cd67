"""Receiving: how one receiver takes a version that is written to it, and passes on what others get from it.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from asyncfabric import Fabric, FabricError, RegionKey
from asyncfabric._groups import unwrapped
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.plan import Plan
from asyncfabric.weights.shares import SHARES
from asyncfabric.weights.update.arrival import Arrival
from asyncfabric.weights.update.coded_forwarding import CodedForwarding, ForwardCodings
from asyncfabric.weights.update.copies import Copy
from asyncfabric.weights.update.forwarding import Forwarding
from asyncfabric.weights.update.intake import Intake, RowPlaces
from asyncfabric.weights.update.landing import Arrivals, LandingMemory
from asyncfabric.weights.update.lane import Failed
from asyncfabric.weights.update.messages import Coded, Opened, Unreachable, Wrote
from asyncfabric.weights.update.messenger import COORDINATOR
from asyncfabric.weights.update.retelling import Retelling
from asyncfabric.weights.update.telling import shares_of
from asyncfabric.weights.update.words import Words


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
