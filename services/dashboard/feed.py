"""Snapshot, then changes: what viewers of any speed receive. On the event loop; encodes each moment once for all.

The changes of the last moments are kept; a viewer that is further behind, since it is slow or comes back, gets a new
snapshot. So no viewer has a queue of its own, and none can make this process grow.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import trio

from asyncfabric_services.dashboard.rows import Row, difference

MOST_KEPT = 32  # changes
MOST_EVENTS = 60
NOWHERE = -1


class DashboardFeed:
    """The moments of a cluster, numbered; a number with the life of this feed is the id of its message.

    Attributes:
        rows: the last moment.
        ended: whether no more will come.
    """

    def __init__(self) -> None:
        self.rows: Mapping[str, Row] = {}
        self.ended = False
        self._life = secrets.token_hex(4)
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MOST_KEPT)
        self._snapshot: tuple[int, bytes] = (NOWHERE, b"")
        self._events: deque[Row] = deque(maxlen=MOST_EVENTS)
        self._unsent: list[Row] = []
        self._counted = 0
        self._news = trio.Event()

    def note(self, kind: str, node: str, text: str) -> None:
        """Add an event; it goes out with the next moment."""
        self._counted += 1
        event = {"n": self._counted, "at": round(time.time(), 1), "kind": kind, "node": node, "text": text}
        self._events.append(event)
        self._unsent = [*self._unsent, event][-MOST_EVENTS:]

    def publish(self, rows: Mapping[str, Row]) -> None:
        """Make these rows the present moment."""
        change = difference(self.rows, rows)
        if not change and not self._unsent:
            return
        self.rows, self._number = rows, self._number + 1
        self._kept.append((self._number, self._message("change", change | {"events": self._unsent})))
        self._unsent = []
        self._wake()

    def position_of(self, last_id: str) -> int:
        """Return the number of the moment that a viewer has seen, by its Last-Event-ID; NOWHERE for none of ours."""
        life, _, number = last_id.partition("-")
        return int(number) if life == self._life and number.isdecimal() and len(number) < 19 else NOWHERE

    def due(self, position: int) -> tuple[bytes, int]:
        """Return what a viewer at this position has to receive, and the position that it then has."""
        oldest = self._number - len(self._kept)
        if not oldest <= position <= self._number:
            if self._snapshot[0] != self._number:
                whole = {"nodes": self.rows, "events": list(self._events)}
                self._snapshot = (self._number, self._message("snapshot", whole))
            return self._snapshot[1], self._number
        return b"".join(message for number, message in self._kept if number > position), self._number

    async def wait_after(self, position: int) -> None:
        """Wait for a moment after this one, or the end.

        Cancellation: only this wait ends.
        """
        while self._number == position and not self.ended:
            await self._news.wait()

    def end(self) -> None:
        """Send all viewers away."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, trio.Event()
        news.set()

    def _message(self, kind: str, body: Mapping[str, Any]) -> bytes:
        text = json.dumps(body, separators=(",", ":"))
        return f"event: {kind}\nid: {self._life}-{self._number}\nretry: 1000\ndata: {text}\n\n".encode()
