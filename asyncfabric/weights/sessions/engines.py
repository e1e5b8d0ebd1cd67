"""Engines: at rank 0 of a training: takes in the engines that join, and names which layouts a version goes to.

Event loop's thread. An engine whose tensors the parameters do not go into is refused by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from asyncfabric._notice import Notice
from asyncfabric.errors import BrokenError, RemoteProtocolError
from asyncfabric.weights.channel import receiver_name, receiver_of
from asyncfabric.weights.coordinator.participants import Presence
from asyncfabric.weights.plan.holdings import Holding
from asyncfabric.weights.sessions.blueprint import Blueprint, JoinAnswer, Wish, get_holdings, planned, put, read
from asyncfabric.weights.sessions.join import Join
from asyncfabric.weights.sessions.layouts import Layouts, wait_returned
from asyncfabric.weights.threads import in_thread

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

JOIN_S = 30.0
"""So long a version waits for an engine that was taken in and has not begun its session with the coordinator."""


APPEAR_S = 2.0
"""And so long for one that was taken in and is not there at all, since its process may have died; and for a rank of the
training that has no session with the coordinator of a layout yet."""

BACK_S = 1.0
"""So long a version waits for the other ranks of engines of which some have come back after they were lost: without
them the ranks of an engine would have two versions."""


class _Expected(NamedTuple):
    """A receiver that was taken in: its layout, since when, and what the coordinator had seen of its name before."""

    layout: int
    since_s: float
    before: Presence

    def has_begun(self, now: Presence) -> bool:
        """Return whether it takes part; an earlier life of its name does not count."""
        return now.here and now.sessions > self.before.sessions


class Engines:
    """The engines of a training, as rank 0 knows them."""

    def __init__(self, join: Join, layouts: Layouts, world: int, chunk_bytes: int, tasks: TaskGroup) -> None:
        """Know none yet."""
        self._join = join
        self._layouts = layouts
        self._world = world
        self._chunk_bytes = chunk_bytes
        self._tasks = tasks
        self._reported: Sequence[Sequence[Holding]] = ()
        self._coming: dict[str, dict[int, tuple[int, Wish]]] = {}  # by engine and rank: number and wish
        self._known: dict[str, tuple[int, list[Wish]]] = {}  # by engine: its layout, and the wishes of its ranks
        self._expected: dict[str, _Expected] = {}  # receivers that were taken in, and have not begun their session
        self._waited: dict[str, tuple[int, ...]] = {}  # by engine: the sessions of its ranks when enough was waited
        self._failure: ValueError | BrokenError | None = None  # there will be no engine
        self._admitted = False  # whether any was taken in
        self._changed = Notice()

    async def run(self) -> None:
        """Take in each engine that joins, as long as there is a meeting.

        Cancellation: at once.
        """
        try:
            self._reported = await get_holdings(self._join, self._world)
            number = 0
            while True:
                try:
                    await self._take(number, await read(self._join, f"wish/{number}", Wish))
                except RemoteProtocolError as error:
                    logger.warning("an engine cannot be taken in: %s", error)
                    await self._answer(number, JoinAnswer(refusal=str(error)))
                number += 1
        except BrokenError as error:
            logger.warning("no more engines can join: %s", error)
            self._failure = error
            self._changed.notify()

    async def wait_first(self) -> None:
        """Return when there is a plan for an engine.

        Raises:
            ValueError: the parameters do not go into the tensors of the first one.
            BrokenError: the meeting ended before there was one.

        Cancellation: only this wait ends.
        """
        await self._until(lambda: bool(self._layouts.plans))

    async def choose(self) -> list[int]:
        """Return the layouts that the next version goes to: those with engines that are not late.

        It waits for engines that were just taken in, and for those that come back rank by rank. Where all are late, all
        are chosen; where no engine is there at all, the first.

        Raises:
            BrokenError: the meeting ended before there was an engine.

        Cancellation: only this wait ends.
        """
        await self._until(lambda: self._admitted)
        for name, expected in list(self._expected.items()):
            await self._wait_expected(name, expected)
        back_by = monotonic() + BACK_S
        for name in list(self._known):
            await self._wait_whole(name, back_by)
        coordinators, appear_by = self._layouts.coordinators, monotonic() + APPEAR_S
        for one in coordinators.values():
            if one.receivers:  # it may have lost the session of a trainer that is about to begin anew
                await wait_returned(one, appear_by)
        able = {layout: one for layout, one in coordinators.items() if one.receivers and not one.absent}
        prompt = [layout for layout, one in able.items() if one.receivers.keys() - one.late]
        return sorted(prompt or able) or [0]

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    # ---- engines that join

    async def _take(self, number: int, wish: Wish) -> None:
        name = wish.replica
        try:
            if not 0 <= wish.rank < wish.ranks:
                raise ValueError(f"rank {wish.rank} of {name}: ranks are 0 to {wish.ranks - 1}")
            receiver_of(receiver_name(name, wish.rank))
        except ValueError as error:
            return await self._answer(number, JoinAnswer(refusal=str(error)))
        known = self._known.get(name)
        if known is not None:
            layout, wishes = known
            if wish.rank >= len(wishes) or wish != wishes[wish.rank]:
                reason = _difference(wish, wishes)
                return await self._answer(number, JoinAnswer(refusal=f"{reason}; take another name for it"))
            self._tasks.start_soon(self._admit, layout, [(number, wish)])
            return None
        ranks = self._coming.setdefault(name, {})
        for rank, (earlier, other) in list(ranks.items()):
            if other.ranks != wish.ranks or rank == wish.rank:  # of a life that ended before all were there
                del ranks[rank]
                await self._answer(earlier, JoinAnswer(refusal=f"rank {rank} of {name} was begun again"))
        ranks[wish.rank] = (number, wish)
        if len(ranks) == wish.ranks:
            del self._coming[name]
            await self._take_whole(name, [ranks[rank] for rank in range(wish.ranks)])
        return None

    async def _take_whole(self, name: str, ranks: list[tuple[int, Wish]]) -> None:
        wishes = [wish for _, wish in ranks]
        layout = next((one for one, other in self._known.values() if _alike(wishes, other)), None)
        if layout is None:
            layout = len(self._layouts.plans)
            try:
                plan, blueprint = await in_thread(planned, self._reported, wishes, self._chunk_bytes)
            except ValueError as error:
                logger.warning("engine %s is refused: %s", name, error)
                if not layout:
                    await put(self._join, "blueprint/0", Blueprint(refusal=str(error)))
                for number, _ in ranks:
                    await self._answer(number, JoinAnswer(refusal=str(error)))
                if not layout:
                    self._failure = error
                    self._changed.notify()
                return
            await put(self._join, f"blueprint/{layout}", blueprint)
            self._layouts.open(layout, plan, blueprint.in_place)
            self._changed.notify()
        self._known[name] = (layout, wishes)
        self._tasks.start_soon(self._admit, layout, ranks)

    async def _admit(self, layout: int, ranks: list[tuple[int, Wish]]) -> None:
        """Answer an engine's ranks once every rank of the training is ready for its layout."""
        await self._layouts.publisher(layout)
        coordinator = self._layouts.coordinators[layout]
        await coordinator.wait_trainers()
        for number, wish in ranks:
            name = receiver_name(wish.replica, wish.rank)
            expected = self._expected[name] = _Expected(layout, monotonic(), coordinator.presence(name))
            self._tasks.start_soon(self._confirm, number, name, expected)
        self._admitted = True
        self._changed.notify()
        for number, _ in ranks:
            await self._answer(number, JoinAnswer(layout))

    async def _confirm(self, number: int, name: str, expected: _Expected) -> None:
        """Report to a receiver that it takes part, once it does: every version that is published later comes to it."""
        coordinator = self._layouts.coordinators[expected.layout]
        while not expected.has_begun(coordinator.presence(name)):
            await coordinator.wait_changed()
        if self._expected.get(name) is expected:
            del self._expected[name]
        await put(self._join, f"joined/{number}", True)

    async def _wait_expected(self, name: str, expected: _Expected) -> None:
        """Wait a while for a receiver that was taken in; not for one that does not appear, or that went again."""
        coordinator = self._layouts.coordinators[expected.layout]
        while True:
            seen = coordinator.presence(name)
            appeared = seen.found > expected.before.found
            left_s = expected.since_s + (JOIN_S if appeared else APPEAR_S) - monotonic()
            if expected.has_begun(seen) or (appeared and not seen.here) or left_s <= 0:
                return
            with anyio.move_on_after(left_s):
                await coordinator.wait_changed()

    async def _wait_whole(self, name: str, until: float) -> None:
        """Wait a while for ranks of an engine of which others have come back, once for each time that they come back.

        A rank that died has mostly had as many sessions as those that are left, and is not waited for; where one of
        these had come back before, it is waited for once.
        """
        layout, wishes = self._known[name]
        coordinator = self._layouts.coordinators.get(layout)
        if coordinator is None:
            return  # its first ranks were not taken in yet
        names = [receiver_name(name, rank) for rank in range(len(wishes))]
        while True:
            sessions = tuple(coordinator.presence(one).sessions for one in names)
            there = [one in coordinator.receivers for one in names]
            back = max((count for count, here in zip(sessions, there, strict=True) if here), default=0)
            if all(back <= count or here for count, here in zip(sessions, there, strict=True)):
                return
            left_s = until - monotonic()
            if left_s <= 0 or self._waited.get(name) == sessions:
                self._waited[name] = sessions
                return
            with anyio.move_on_after(left_s):
                await coordinator.wait_changed()

    async def _answer(self, number: int, answer: JoinAnswer) -> None:
        await put(self._join, f"answer/{number}", answer)


def _alike(wishes: Sequence[Wish], others: Sequence[Wish]) -> bool:
    """Return whether two engines have one plan."""
    one, other = wishes[0], others[0]
    same_table = (one.rules, one.tied, one.conversions) == (other.rules, other.tied, other.conversions)
    mine, theirs = ([(each.tensors, each.in_place) for each in ranks] for ranks in (wishes, others))
    return same_table and mine == theirs


def _difference(wish: Wish, known: Sequence[Wish]) -> str:
    """Return what a rank has otherwise than the engine of its name."""
    who = f"rank {wish.rank} of {wish.replica}"
    if wish.ranks != len(known):
        return f"{who}: it has {wish.ranks} ranks, and joined with {len(known)}"
    before = known[wish.rank]
    for name in sorted(before.tensors.keys() | wish.tensors.keys()):
        if before.tensors.get(name) != wish.tensors.get(name):
            return (
                f"{name}: {who} has {wish.tensors.get(name, 'no such tensor')}, and joined with "
                f"{before.tensors.get(name, 'no such tensor')}"
            )
    if wish.in_place != before.in_place:
        return f"{who} joined {'in place' if before.in_place else 'with a shadow'}, and comes back otherwise"
    return f"{who} has other rules than it joined with"
