"""Asks all nodes about themselves while somebody looks, once for all viewers. On the event loop of the directory.

At most QUICK nodes are asked at a time; those that did not answer last time have places of their own, so that they
hold up nobody. What the directory itself knows goes out at once. While nobody looks nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import trio

from asyncfabric.control import DirectoryClient
from asyncfabric_services.dashboard.feed import DashboardFeed
from asyncfabric_services.dashboard.history import NodeHistory
from asyncfabric_services.dashboard.rows import Row, events_between, rows_of
from asyncfabric_services.look.asking import NoAnswer, checked_url
from asyncfabric_services.look.sampling import sample

INTERVAL_S = 0.5
PATIENCE_S = 1.0
QUICK, SLOW = 16, 16
MOST_BYTES = 4 << 20  # of an answer

Members = Callable[[], Sequence[Mapping[str, str]]]


class DashboardPoll:
    """The eyes of all viewers. `members` returns the rows of the directory's `/nodes`."""

    def __init__(self, feed: DashboardFeed, members: Members) -> None:
        self._feed = feed
        self._members = members
        self._histories: dict[str, NodeHistory] = {}
        self._asked: set[str] = set()
        self._viewers = 0
        self._watched = trio.Event()
        self._looking = trio.CancelScope()
        self._answered = trio.Event()
        self._quick, self._slow = trio.CapacityLimiter(QUICK), trio.CapacityLimiter(SLOW)

    @property
    def viewers(self) -> int:
        """Return how many look."""
        return self._viewers

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Be somebody who looks, for the length of the scope."""
        self._viewers += 1
        if self._viewers == 1:
            self._histories.clear()  # rates since the last viewer left would be of no use
            self._feed.publish(self._rows())
            self._watched.set()
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._looking.cancel()

    async def run(self) -> None:
        """Ask whenever somebody looks, until cancelled.

        Cancellation: connections are dropped.
        """
        while True:
            if not self._viewers:
                self._watched = trio.Event()
            await self._watched.wait()
            with trio.CancelScope() as self._looking:
                if self._viewers:
                    await self._look()
            self._asked.clear()

    async def follow(self, client: DirectoryClient) -> None:
        """Note who joins, drains, leaves and is lost, until cancelled.

        Cancellation: ends the watch.
        """
        while True:  # a watcher that is too far behind is ended, and watches anew
            async with client.watch() as changes:
                async for change in changes:
                    text = f"{change.node.role}: {change.reason}" if change.reason else change.node.role
                    self._feed.note(change.kind, change.node.identity.name, text)
                    if self._viewers:
                        self._publish()

    async def _look(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                due = trio.current_time() + INTERVAL_S
                for member in self._members():
                    if member["http"] and member["incarnation"] not in self._asked:
                        self._asked.add(member["incarnation"])
                        nursery.start_soon(self._ask, member["incarnation"], member["http"])
                with trio.move_on_at(due):
                    while self._asked:
                        await self._answered.wait()
                self._publish()
                await trio.sleep_until(due)

    async def _ask(self, incarnation: str, url: str) -> None:
        history = self._histories.setdefault(incarnation, NodeHistory())
        async with self._slow if history.missed else self._quick:
            try:
                history.take(await sample(checked_url(url), PATIENCE_S, MOST_BYTES))
            except NoAnswer as error:
                history.miss(str(error), late=error.late)
            except ValueError as error:  # a label of the directory need be no address
                history.miss(str(error), late=False)
        self._asked.discard(incarnation)
        self._answered.set()
        self._answered = trio.Event()

    def _rows(self) -> dict[str, Row]:
        members = self._members()
        living = {member["incarnation"] for member in members}
        self._histories = {key: history for key, history in self._histories.items() if key in living}
        return rows_of(members, self._histories)

    def _publish(self) -> None:
        rows = self._rows()
        for kind, node, text in events_between(self._feed.rows, rows):
            self._feed.note(kind, node, text)
        self._feed.publish(rows)
