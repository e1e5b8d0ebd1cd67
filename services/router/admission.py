"""Admission: who may come in, who waits and is next, and how all leave when the node drains.

Runs on the event loop; one per node. Who waits is ordered by priority, and a step of priority is worth AGEING_S of
waiting, so that nobody waits for ever.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from types import TracebackType

import trio

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.fault import RETRY_SECONDS, drained, not_ready, overloaded

AGEING_S = 1.0
LONGEST_RETRY_SECONDS = 60
DEPARTURES = 64  # the latest ones, of which the rate is taken


class AdmittedPlace:
    """The place of one request, inside or in the queue, until its `with` scope is left; made by RequestAdmission.

    Attributes:
        scope: what a drain deadline cancels.
        cut_off: whether it did.
        turn: set when the request is inside, or is not to wait any more.
    """

    def __init__(self, admission: RequestAdmission, rank: float) -> None:
        self.scope = trio.CancelScope()
        self.cut_off = False
        self.turn = trio.Event()
        self.rank = rank
        self._admission = admission

    def __enter__(self) -> AdmittedPlace:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave, wherever it is."""
        self._admission.leave(self)


class RequestAdmission:
    """Lets at most `most_requests` in, and others wait, refuses one too many, and waits for the last to leave."""

    def __init__(
        self, condition: Condition, most_requests: int, most_waiting: int = 0, longest_wait: float = math.inf
    ) -> None:
        if most_requests < 1:
            raise ValueError(f"most_requests must be at least 1, got {most_requests}")
        self._condition = condition
        self._most = most_requests
        self._most_waiting = most_waiting
        self._longest_wait = longest_wait
        self._places: set[AdmittedPlace] = set()
        self._queue: list[AdmittedPlace] = []
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._empty = trio.Event()
        self._empty.set()

    @property
    def count(self) -> int:
        """Return how many requests are inside."""
        return len(self._places)

    @property
    def waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._queue)

    def check(self) -> None:
        """Raise the ApiFault that a request would get that came now."""
        if not self._condition.takes_work:
            raise not_ready(self._condition.state)
        if len(self._places) >= self._most and len(self._queue) >= self._most_waiting:
            waiting = f" and {len(self._queue)} wait" if self._queue else ""
            raise overloaded(
                f"{len(self._places)} requests are being answered{waiting}, which is the most: try again",
                self.retry_seconds(),
            )

    def admit(self) -> AdmittedPlace:
        """Return a place inside; raises ApiFault 503 when draining and 429 when full. Nobody may wait."""
        if self._most_waiting:
            raise ValueError("requests wait here: join, and wait for the turn")
        self.check()
        return self._enter(AdmittedPlace(self, 0.0))

    def join(self, priority: int) -> AdmittedPlace:
        """Return a place, inside if there is one, or in the queue: `wait_turn`; raises what `check` does.

        Requests of a lower `priority` come first, except those who waited longer by AGEING_S for each step.
        """
        self.check()
        place = AdmittedPlace(self, trio.current_time() + AGEING_S * priority)
        if len(self._places) < self._most:
            self._departures.clear()  # requests came more slowly than others left
            return self._enter(place)
        insort(self._queue, place, key=lambda one: one.rank)  # behind its equals
        return place

    async def wait_turn(self, place: AdmittedPlace) -> None:
        """Wait until a place is inside.

        Raises ApiFault 429 when it waited longer than it may, and 503 when a drain cut it off.

        Cancellation: it keeps its place in the queue, until its scope is left.
        """
        with trio.move_on_after(self._longest_wait):
            await place.turn.wait()
        if place.cut_off:
            raise drained()
        if not place.turn.is_set():
            raise overloaded(
                f"the request waited for {self._longest_wait:g} s while {len(self._places)} others were answered, "
                "which is the longest: try again",
                self.retry_seconds(),
            )

    def leave(self, place: AdmittedPlace) -> None:
        """Give up a place, inside or in the queue; called when its scope is left."""
        if place in self._places:
            if self._most_waiting:
                self._departures.append(trio.current_time())
            self._places.remove(place)
            if self._queue:
                self._enter(self._queue.pop(0))
            if not self._places:
                self._empty.set()
        elif place in self._queue:
            self._queue.remove(place)

    def retry_seconds(self) -> int:
        """Return after how many seconds who waits now is inside, at the rate at which others left since it is full."""
        if len(self._departures) < 2:
            return RETRY_SECONDS
        interval = (trio.current_time() - self._departures[0]) / (len(self._departures) - 1)
        return min(max(math.ceil((len(self._queue) + 1) * interval), RETRY_SECONDS), LONGEST_RETRY_SECONDS)

    async def wait_empty(self) -> None:
        """Wait until nobody is inside: nobody waits then.

        Cancellation: changes nothing.
        """
        while self._places:
            await self._empty.wait()

    def cut_off(self) -> int:
        """Cancel all requests, each answers that the node was stopped; returns how many."""
        left = [*self._places, *self._queue]
        self._queue.clear()
        for place in left:
            place.cut_off = True
            place.scope.cancel()
            place.turn.set()
        return len(left)

    def _enter(self, place: AdmittedPlace) -> AdmittedPlace:
        self._places.add(place)
        if self._empty.is_set():
            self._empty = trio.Event()
        place.turn.set()
        return place
