"""StepwiseExchange: what every exchange has, whoever moves its bytes: who takes part, and its steps in their order.

Runs on the event loop's thread. How a step is done stands in the exchanges; here is what they refuse alike, and how
they go on without ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Generic, Protocol, TypeVar

import anyio

from asyncfabric import BrokenError, BusyError, Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.group import MoeGroup


class StepHandle(Protocol):
    """What handles of all exchanges have: which step of which epoch they are."""

    number: int
    epoch: int


HandleT = TypeVar("HandleT", bound=StepHandle)


class StepwiseExchange(Generic[HandleT]):
    """Common to all exchanges; made by opening one of them.

    Attributes:
        config: the shape.
        rank: of this process.
        epoch: how often ranks were excluded.
    """

    def __init__(self, fabric: Fabric, group: MoeGroup, config: MoeConfig) -> None:
        """Not for users."""
        self.config: MoeConfig = config
        self.rank: int = group.rank
        self.epoch: int = 0
        self._fabric = fabric
        self._group = group
        self._present: tuple[int, ...] = tuple(range(config.ranks))
        self._stack = AsyncExitStack()
        self._next = 0
        self._flying: dict[int, HandleT] = {}

    @property
    def experts(self) -> range:
        """The experts of this rank."""
        return self.config.experts_of(self.rank)

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._present

    @property
    def in_flight(self) -> tuple[HandleT, ...]:
        """Steps that were dispatched and not combined yet, oldest first; also those whose call was cancelled."""
        return tuple(self._flying.values())

    async def exclude(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks. All others must call it with the same ranks; steps in flight are lost.

        Choices of their experts count as masked from then on; weights are not changed. With nodes, whole nodes go.
        Opens new memory with new keys, so nothing that an excluded rank still does can reach it; graphs that were
        captured before must be captured again. Ranks meet in the epoch that they count: one that repeats a call that
        failed needs all others to repeat it too, if need be with no rank to exclude.

        Raises:
            ValueError: no such rank, the own one, one that is excluded already, or a part of a node.
            MissingRankError: another rank is lost or does not follow before the caller's deadline.

        Cancellation: the exchange is broken until another `exclude` succeeds.
        """
        gone = set(ranks)
        if not gone <= set(self._present) - {self.rank}:
            raise ValueError(f"can exclude {sorted(set(self._present) - {self.rank})}, got {sorted(gone)}")
        size = self.config.node_size
        halves = [node for node in {rank // size for rank in gone} if sum(rank // size == node for rank in gone) < size]
        if halves:
            raise ValueError(f"nodes are excluded whole; of nodes {sorted(halves)} only some ranks were named")
        self._shut()
        self._flying.clear()
        self._present = tuple(rank for rank in self._present if rank not in gone)
        self.epoch += 1
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
        await self._open()
        self._next = 0

    async def _open(self) -> None:
        """Open what an epoch needs; closed with the stack."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Let no step begin any more: what is open is about to be closed."""
        raise NotImplementedError

    def _check_room(self) -> None:
        """Refuse a step whose turn is not free (MOE-1): steps are combined in any order, turns are taken in order."""
        limit = self.config.in_flight
        oldest = next(iter(self._flying), self._next)
        if self._next - oldest >= limit:
            raise BusyError(f"{limit} steps are in flight; combine step {oldest} first")

    def _begun(self, handle: HandleT) -> None:
        self._next += 1
        self._flying[handle.number] = handle

    def _check_turn(self, what: str, handle: HandleT, late: Callable[[HandleT], bool]) -> None:
        """Steps go through each half in the order of dispatch: ranks that took different orders could wait for ever."""
        for number, older in self._flying.items():
            if number < handle.number and late(older):
                raise ValueError(f"step {handle.number} cannot be {what} before step {number}, which is older")

    def _check_epoch(self, session: object, handle: HandleT | None) -> None:
        if session is None:
            raise BrokenError("the exchange is closed, or excluding ranks did not succeed")
        if handle is not None and handle.epoch != self.epoch:
            raise BrokenError(f"step {handle.number} is of epoch {handle.epoch}; it was lost when ranks were excluded")
