"""Layouts: what one rank of a training opens for each layout of its engines: a publisher, at rank 0 a coordinator too.

Event loop's thread. Engines that are laid out alike share a plan, and fetch from each other; updates of different
layouts know nothing of each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncfabric import Fabric
from asyncfabric._notice import Notice
from asyncfabric.errors import BrokenError
from asyncfabric.weights.channel import COORDINATOR, trainer_name
from asyncfabric.weights.coordinator.coordinator import WeightCoordinator, open_coordinator
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.sender.publisher import WeightPublisher, open_publisher
from asyncfabric.weights.sessions.blueprint import get_blueprint
from asyncfabric.weights.sessions.join import Join
from asyncfabric.weights.sessions.scoped import open_scoped

logger: logging.Logger = logging.getLogger("asyncfabric.weights")


DESERTED_S = 1.0
"""So long the ranks of a training wait for one that is lost to come back, before a version is refused."""


class Layouts:
    """The layouts that one rank of a training serves, by number.

    Attributes:
        rank: of the training.
        publishers, coordinators, plans: of each layout; coordinators at rank 0 only.
    """

    def __init__(
        self, fabric: Fabric, join: Join, rank: int, shards: Mapping[str, Any], log: Path | None, tasks: TaskGroup
    ) -> None:
        """Serve none yet; `log`: what the files of decisions begin with."""
        self.rank: int = rank
        self.publishers: dict[int, WeightPublisher] = {}
        self.coordinators: dict[int, WeightCoordinator] = {}
        self.plans: dict[int, Plan] = {}
        self._fabric = fabric
        self._join = join
        self._shards = shards
        self._log = log
        self._tasks = tasks
        self._opened = Notice()

    def open(self, layout: int, plan: Plan, in_place: bool) -> None:
        """Begin to serve a layout; `in_place`: versions arrive in the tensors of its engines."""
        self.plans[layout] = plan
        self._tasks.start_soon(self._serve, layout, plan, in_place)

    async def publisher(self, layout: int) -> WeightPublisher:
        """Return the publisher of a layout once it is open.

        Cancellation: only this wait ends.
        """
        while layout not in self.publishers:
            await self._opened.wait()
        return self.publishers[layout]

    async def follow(self) -> None:
        """Serve each further layout that rank 0 makes a plan of, as long as there is a meeting.

        Cancellation: at once.
        """
        try:
            while True:
                layout = len(self.plans)
                plan, blueprint = await get_blueprint(self._join, layout)
                self.open(layout, plan, blueprint.in_place)
        except BrokenError as error:
            logger.warning("no more layouts of engines come: %s", error)

    async def _serve(self, layout: int, plan: Plan, in_place: bool) -> None:
        async with AsyncExitStack() as stack:
            if self.rank == 0:
                channel = await stack.enter_async_context(open_scoped(self._join, self._fabric, layout, COORDINATOR))
                kind = f"{plan.digest[:12]}{'-in-place' if in_place else ''}"  # one plan may be of two layouts
                log = self._log.with_name(f"{self._log.name}.{kind}") if self._log else None
                # In place nobody may hold the last version while the next one comes: the training has its weights.
                coordinator = await stack.enter_async_context(open_coordinator(channel, plan, log, keep=not in_place))
                self._tasks.start_soon(_decide, coordinator)
                self._tasks.start_soon(_refuse_deserted, coordinator)
                self.coordinators[layout] = coordinator
            mine = await stack.enter_async_context(
                open_scoped(self._join, self._fabric, layout, trainer_name(self.rank))
            )
            self.publishers[layout] = await stack.enter_async_context(
                open_publisher(self._fabric, mine, plan, self.rank, self._shards, gather=not in_place)
            )
            self._opened.notify()
            await anyio.sleep_forever()


async def _decide(coordinator: WeightCoordinator) -> None:
    async with aclosing(coordinator.offers()) as offers:
        async for version in offers:
            try:
                await coordinator.update(version)
            except (BrokenError, ValueError) as error:  # the senders raise it, engines keep what they have
                logger.warning("version %d was not committed: %s", version, error)


async def wait_returned(coordinator: WeightCoordinator, appear_by: float = 0.0) -> None:
    """Return when all ranks of the training have a session, or nobody that has none is waited for any more.

    A rank that had one is waited for until DESERTED_S after its loss, one that had none yet until `appear_by`, a time
    of time.monotonic().

    Cancellation: only this wait ends.
    """
    while absent := coordinator.absent:
        had_one = {name: coordinator.presence(name).found for name in absent}
        limits = [since_s + DESERTED_S if had_one[name] else appear_by for name, since_s in absent.items()]
        left_s = max(limits) - monotonic()
        if left_s <= 0:
            return
        with anyio.move_on_after(left_s):
            await coordinator.wait_changed()


async def _refuse_deserted(coordinator: WeightCoordinator) -> None:
    """Refuse what is offered while a rank of the training is lost: the others would wait for its offer for ever."""
    await coordinator.wait_trainers()
    while True:
        while not coordinator.absent:
            await coordinator.wait_changed()
        await wait_returned(coordinator)
        if absent := sorted(coordinator.absent):
            coordinator.refuse_offers(f"{', '.join(absent)} is lost")
            await coordinator.wait_changed()
