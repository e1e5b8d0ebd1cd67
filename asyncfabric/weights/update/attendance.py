"""Attendance: what is asked of a coordinator: who is there and holds what, what is decided, what trainers offer.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from time import monotonic

from asyncfabric._notice import Notice
from asyncfabric.weights.commit.coordinator import Coordinator
from asyncfabric.weights.commit.decision_log import DecisionLog
from asyncfabric.weights.update.messenger import receiver_of
from asyncfabric.weights.update.offers import Offers


class Attendance:
    """Who a coordinator knows of; the base of WeightCoordinator, which tells of each change."""

    def __init__(self, trainers: tuple[str, ...], log: DecisionLog) -> None:
        """Begin with what the log says; nobody is there."""
        self._trainers = trainers
        self._log = log
        self._machine = Coordinator(begun=log.begun, committed=log.committed, seat=lambda name: receiver_of(name)[1])
        self._offers = Offers(trainers)
        self._changed = Notice()
        self._absent: dict[str, float] = dict.fromkeys(trainers, monotonic())

    @property
    def trainers(self) -> int:
        """How many trainers the plan has."""
        return len(self._trainers)

    @property
    def absent(self) -> dict[str, float]:
        """The trainers that have no session with the coordinator, and since when, on time.monotonic()."""
        return dict(self._absent)

    @property
    def committed(self) -> int:
        """The latest decided version, 0 for none."""
        return self._machine.committed

    @property
    def begun(self) -> int:
        """The latest version that was begun, also one that nobody was there for. The next is later."""
        return max(self._log.begun, self._machine.begun)

    @property
    def receivers(self) -> dict[str, int]:
        """The receivers that are there, and the complete version that each holds."""
        return self._machine.receivers

    async def wait_receivers(self, names: Iterable[str]) -> None:
        """Return when these receivers are there.

        Cancellation: only this wait ends.
        """
        wanted = set(names)
        while not wanted <= set(self._machine.receivers):
            await self._changed.wait()

    async def wait_held(self, names: Iterable[str], version: int) -> None:
        """Return when these receivers hold this version or a later one.

        Cancellation: only this wait ends.
        """
        wanted = set(names)
        while not all(self._machine.receivers.get(name, 0) >= version for name in wanted):
            await self._changed.wait()

    async def offers(self) -> AsyncIterator[int]:
        """Yield each version that all trainers offer, for a loop that updates to it.

        Cancellation: nothing is lost.
        """
        while True:
            while (version := self._offers.agreed) is None:
                await self._changed.wait()
            yield version
            while self._offers.agreed == version:  # until it was taken up, or refused
                await self._changed.wait()
