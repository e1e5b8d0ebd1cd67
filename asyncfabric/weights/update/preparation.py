"""Preparation: what a trainer works out for a plan before it sends: program, exchange of maxima, staging memory.

Runs on the event loop's thread. Kept while the plan stays the same.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio

from asyncfabric import Fabric, RemoteProtocolError
from asyncfabric.weights.plan import Plan
from asyncfabric.weights.update.exchange import Exchange
from asyncfabric.weights.update.messages import Maxima, Roster
from asyncfabric.weights.update.messenger import trainer_name
from asyncfabric.weights.update.program import Program
from asyncfabric.weights.update.rosters import RosterPlans
from asyncfabric.weights.update.scratch import Scratch, open_scratch
from asyncfabric.weights.update.shards import Shards


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
            RemoteProtocolError: nobody said who takes part.
            ValueError: the scratch is too small for one piece.
            DeviceError: no memory left.

        Cancellation: nothing was opened, or it is kept.
        """
        plan = self._plan
        if plan is None:
            raise RemoteProtocolError("the coordinator says Write before it says who takes part")
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
        """Return whether words of another participant matter for a version.

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
