"""Coordinator: what the program of a coordinator holds: who is there, what is decided, and the next update.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from asyncfabric._groups import beside
from asyncfabric.weights.channel import WeightChannel
from asyncfabric.weights.coordinator.decision_log import DecisionLog
from asyncfabric.weights.coordinator.participants import Presence
from asyncfabric.weights.coordinator.progress import UpdateReport
from asyncfabric.weights.coordinator.updates import GRACE_S, Updates
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.threads import in_thread


class WeightCoordinator:
    """The coordinator; made by `async with open_coordinator(...)`."""

    def __init__(self, updates: Updates) -> None:
        """Not for users: `async with open_coordinator(...)`."""
        self._updates = updates

    @property
    def trainers(self) -> int:
        """How many trainers the plan has."""
        return len(self._updates.trainers)

    @property
    def absent(self) -> dict[str, float]:
        """The trainers that have no session with the coordinator, and since when, on time.monotonic()."""
        return dict(self._updates.absent)

    @property
    def committed(self) -> int:
        """The latest decided version, 0 for none."""
        return self._updates.machine.committed

    @property
    def begun(self) -> int:
        """The latest version that was begun, also one that nobody was there for. The next is later."""
        return self._updates.begun

    @property
    def receivers(self) -> dict[str, int]:
        """The receivers that are there, and the complete version that each holds."""
        return self._updates.machine.receivers

    @property
    def late(self) -> frozenset[str]:
        """The receivers of engines that were left out of an update and have not reached a step boundary since."""
        return self._updates.machine.late

    def unprepared(self, version: int) -> tuple[bool, tuple[str, ...]]:
        """Return whether an engine has opened its memory for a version, and the receivers that have not yet."""
        return self._updates.unprepared(version)

    def leave_out(self, version: int, names: Iterable[str], reason: str) -> None:
        """Go on with a version without the engines of these receivers, if they have not opened their memory.

        They keep what they have, get later versions once they have reached a step boundary, and are not waited for
        until then. A version that nobody else is there for is aborted.
        """
        self._updates.leave_out(version, names, reason)

    def refuse_offers(self, reason: str) -> None:
        """Answer every trainer that offers a version: it will not begin, and why. An open update goes on."""
        self._updates.refuse_offers(reason)

    async def wait_trainers_informed(self) -> None:
        """Return when every outcome so far has left for all trainers that are there: the coordinator may end.

        Cancellation: only this wait ends.
        """
        await self._updates.wait_trainers_informed()

    async def wait_changed(self) -> None:
        """Return when anything here has changed.

        Cancellation: only this wait ends.
        """
        await self._updates.changed.wait()

    async def wait_trainers(self) -> None:
        """Return when all trainers are there.

        Cancellation: only this wait ends.
        """
        while self._updates.absent:
            await self._updates.changed.wait()

    async def wait_receivers(self, names: Iterable[str]) -> None:
        """Return when these receivers are there.

        Cancellation: only this wait ends.
        """
        wanted = set(names)
        while not wanted <= set(self._updates.machine.receivers):
            await self._updates.changed.wait()

    def presence(self, name: str) -> Presence:
        """Return what was seen of a name so far; a later life of a receiver is found, and begins, anew."""
        return self._updates.presence.get(name, Presence())

    async def wait_held(self, names: Iterable[str], version: int) -> None:
        """Return when these receivers hold this version or a later one.

        Cancellation: only this wait ends.
        """
        wanted = set(names)
        while not all(self._updates.machine.receivers.get(name, 0) >= version for name in wanted):
            await self._updates.changed.wait()

    async def offers(self) -> AsyncGenerator[int, None]:
        """Yield each version that all trainers offer, for a loop that updates to it.

        Cancellation: nothing is lost.
        """
        while True:
            while (version := self._updates.proposals.agreed) is None:
                await self._updates.changed.wait()
            yield version
            while self._updates.proposals.agreed == version:  # until it was taken up, or refused
                await self._updates.changed.wait()

    @property
    def refused(self) -> dict[str, str]:
        """The receivers that take part in nothing, since their plan is another one, and why."""
        return dict(self._updates.admission.refused)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Who the open update waits for."""
        return self._updates.awaited

    async def update(self, version: int) -> UpdateReport:
        """Wait until every trainer offers a version, and bring it to every receiver that is there, or to none.

        Raises:
            ValueError: the version is not later than all that were begun.
            BusyError: an update is open.
            BrokenError: the update was aborted, and the text states why; replicas serve what they served.

        Cancellation: the update is aborted, unless it is being decided.
        """
        return await self._updates.update(version)


@asynccontextmanager
async def open_coordinator(
    channel: WeightChannel, plan: Plan, log_path: Path | None, *, grace_s: float = GRACE_S, keep: bool = True
) -> AsyncIterator[WeightCoordinator]:
    """Open the coordinator of updates; one at a time for a log. After a restart it goes on from the log.

    Args:
        channel: of `COORDINATOR`; it is the coordinator's to receive from.
        plan: moves and relay; its replicas do not matter, receivers join by having a session.
        log_path: of the decision log; None: in memory, which ends with this process.
        grace_s: see GRACE_S.
        keep: refuse an update that would leave nobody who holds the committed version. False where trainers can
            publish again what they published: then an update that fails may leave replicas without any version.

    Raises:
        BusyError: another process has the log open.
        BrokenError: the log cannot be read or written.

    Cancellation: at once; an open update is undecided, which is an abort. A decision that is being written is
    finished first.
    """
    log = await in_thread(DecisionLog, log_path)
    try:
        async with beside() as tasks:
            updates = Updates(channel, plan, log, tasks, grace_s, keep)
            tasks.start_soon(updates.run)
            yield WeightCoordinator(updates)
    finally:
        log.close()
