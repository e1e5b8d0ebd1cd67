"""Admission: who may come in, and how all leave when the node drains. Runs on the event loop; one per router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.fault import not_ready, overloaded


class AdmittedPlace:
    """The place of one admitted request; `scope` is what a drain deadline cancels."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.cut_off = False


class RequestAdmission:
    """Counts requests in, refuses one too many, and waits for the last to leave."""

    def __init__(self, condition: Condition, most_requests: int) -> None:
        if most_requests < 1:
            raise ValueError(f"most_requests must be at least 1, got {most_requests}")
        self._condition = condition
        self._most = most_requests
        self._places: set[AdmittedPlace] = set()
        self._empty = trio.Event()
        self._empty.set()

    @property
    def count(self) -> int:
        """Return how many requests are inside."""
        return len(self._places)

    def check(self) -> None:
        """Raise the ApiFault that a request would get that came now."""
        if not self._condition.takes_work:
            raise not_ready(self._condition.state)
        if len(self._places) >= self._most:
            raise overloaded(f"{len(self._places)} requests are being answered, which is the most: try again")

    @contextmanager
    def admit(self) -> Iterator[AdmittedPlace]:
        """Give a place for the length of the scope; raises ApiFault 503 when draining and 429 when full."""
        self.check()
        place = AdmittedPlace()
        self._places.add(place)
        self._empty = trio.Event()
        try:
            yield place
        finally:
            self._places.remove(place)
            if not self._places:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until nobody is inside.

        Cancellation: changes nothing.
        """
        while self._places:
            await self._empty.wait()

    def cut_off(self) -> int:
        """Cancel all requests, each answers that the node was stopped; returns how many."""
        for place in self._places:
            place.cut_off = True
            place.scope.cancel()
        return len(self._places)
