"""The queue before a router: who is next, how long others are asked to stay away, and that no place is lost."""

from __future__ import annotations

import math
import random

import pytest
import trio
import trio.testing

pytest.importorskip("starlette", reason="the router needs starlette")

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.admission import AGEING_S, LONGEST_RETRY_SECONDS, RequestAdmission
from asyncfabric_services.router.fault import ApiFault

pytestmark = pytest.mark.trio


def admission_of(most: int, waiting: int, longest_wait: float = math.inf) -> RequestAdmission:
    return RequestAdmission(Condition("n", "router", "ready"), most, waiting, longest_wait)


class Crowd:
    """Requests of one admission; `order` is that in which they came in."""

    def __init__(self, admission: RequestAdmission) -> None:
        self.admission = admission
        self.order: list[str] = []
        self.faults: dict[str, ApiFault] = {}

    async def ask(self, name: str, priority: int = 0, seconds: float = 1.0) -> None:
        try:
            with self.admission.join(priority) as place:
                await self.admission.wait_turn(place)
                self.order.append(name)
                await trio.sleep(seconds)
        except ApiFault as fault:
            self.faults[name] = fault


async def test_the_lower_priority_is_next_and_equals_keep_their_order(autojump_clock: trio.testing.MockClock) -> None:
    crowd = Crowd(admission_of(1, 9))
    async with trio.open_nursery() as nursery:
        for name, priority in (("first", 50), ("b", 1), ("a", -3), ("c", 1), ("d", 2)):
            nursery.start_soon(crowd.ask, name, priority, 0.1)
            await trio.testing.wait_all_tasks_blocked()
        assert (crowd.admission.count, crowd.admission.waiting) == (1, 4)
    assert crowd.order == ["first", "a", "b", "c", "d"]
    assert (crowd.admission.count, crowd.admission.waiting) == (0, 0)


async def test_nobody_is_overtaken_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    """Requests of the highest priority come faster than they are answered: one of priority 5 waits for 5 steps."""
    crowd = Crowd(admission_of(1, 1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.ask, "begun")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(crowd.ask, "patient", 5)
        for number in range(40):
            nursery.start_soon(crowd.ask, f"{number}")
            await trio.sleep(AGEING_S / 2)
    assert crowd.order.index("patient") == 5 / (AGEING_S / 2) + 1


async def test_one_too_many_is_asked_to_come_back_when_there_is_room(autojump_clock: trio.testing.MockClock) -> None:
    crowd = Crowd(admission_of(2, 9))
    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(crowd.ask, f"{number}", 0, 3)
            await trio.testing.wait_all_tasks_blocked()
        assert crowd.faults["11"].retry_after == 1, "nobody has left yet"
        assert "2 requests are being answered and 9 wait" in str(crowd.faults["11"])
        await trio.sleep(9.5)  # six have left, two each 3 s, and three wait
        for number in range(12, 19):
            nursery.start_soon(crowd.ask, f"{number}", 0, 3)
            await trio.testing.wait_all_tasks_blocked()
        fault = crowd.faults["18"]
        assert fault.status == 429 and 10 <= (fault.retry_after or 0) <= 20
        assert fault.headers() == {"retry-after": str(fault.retry_after)}
    assert len(crowd.order) == 17
    slow = Crowd(admission_of(1, 1))
    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(slow.ask, f"{number}", 0, 1000)
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(2500 if number == 2 else 0)
        assert slow.faults["5"].retry_after == 1, "the time before it was empty does not count"


async def test_the_longest_wait_is_an_answer(autojump_clock: trio.testing.MockClock) -> None:
    crowd = Crowd(admission_of(1, 9, longest_wait=7))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.ask, "first", 0, 10_000)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(crowd.ask, "second")
        await trio.sleep(7.5)
        assert crowd.faults["second"].status == 429
        assert "waited for 7 s while 1 others were answered" in str(crowd.faults["second"])
        assert crowd.admission.waiting == 0
        nursery.cancel_scope.cancel()
    assert 1 <= crowd.admission.retry_seconds() <= LONGEST_RETRY_SECONDS


async def test_a_drain_answers_those_who_wait_and_cuts_off_the_rest(autojump_clock: trio.testing.MockClock) -> None:
    condition = Condition("n", "router", "ready")
    crowd = Crowd(RequestAdmission(condition, 1, 9))
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(crowd.ask, name, 0, 2)
            await trio.testing.wait_all_tasks_blocked()
        condition.drain("by script")
        nursery.start_soon(crowd.ask, "late")
        with trio.move_on_after(3):
            await crowd.admission.wait_empty()
        assert crowd.admission.cut_off() == 2
        await crowd.admission.wait_empty()
    assert crowd.order == ["a", "b"]
    assert {name: fault.status for name, fault in crowd.faults.items()} == {"c": 503, "late": 503}
    assert "stopped before the answer was complete" in str(crowd.faults["c"])


@pytest.mark.parametrize("seed", range(8))
async def test_no_place_is_lost_however_they_leave(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    rnd = random.Random(seed)
    crowd = Crowd(admission_of(3, 12, longest_wait=4))

    async def ask(name: str) -> None:
        await trio.sleep(rnd.random() * 30)
        with trio.move_on_after(rnd.choice((0.5, 2, 1000))):
            await crowd.ask(name, rnd.randrange(-9, 9), rnd.random() * 2)
        assert crowd.admission.count <= 3 and crowd.admission.waiting <= 12
        assert crowd.admission.count == 3 or not crowd.admission.waiting

    async with trio.open_nursery() as nursery:
        for number in range(150):
            nursery.start_soon(ask, f"{number}")
    assert (crowd.admission.count, crowd.admission.waiting) == (0, 0)
    assert len(crowd.order) > 30 and crowd.faults
    await crowd.admission.wait_empty()
