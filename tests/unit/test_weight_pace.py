"""Pace: a few are heard at once, many at a steady beat. trio's mock clock: nothing really waits."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from asyncfabric.weights.update import pace
from asyncfabric.weights.update.pace import BEATS_AT_ONCE, BEATS_PER_S, IDLE_BEATS, Pace


def test_few_are_heard_at_once_and_many_at_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []
    said: list[int] = []

    def take_nowait() -> list[int]:
        found, said[:] = said[:], []
        return found

    async def rests(count: int) -> None:
        begin = trio.current_time()
        for _ in range(count):
            said.append(1)
            assert (await beat.listen(take_nowait) or take_nowait()) == [1]
        took.append(trio.current_time() - begin)

    async def body() -> None:
        nonlocal beat
        monkeypatch.setattr(pace, "monotonic", trio.current_time)
        beat = Pace()
        await rests(BEATS_AT_ONCE)
        await rests(100)
        await trio.sleep(10)
        await rests(BEATS_AT_ONCE)
        await rests(1)
        begin = trio.current_time()
        assert await beat.listen(take_nowait) == []
        assert trio.current_time() - begin > IDLE_BEATS / BEATS_PER_S

    beat = Pace()
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
    assert took[0] == took[2] == 0
    assert took[1] == pytest.approx(100 / BEATS_PER_S)
