"""BatchingInterval: a few are received at once, many at a steady beat. trio's mock clock: nothing really waits."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from asyncfabric._notice import Notice
from asyncfabric.weights import outbox
from asyncfabric.weights.outbox import (
    BATCHES_AT_ONCE,
    BATCHES_PER_S,
    FEW_SENDERS,
    IDLE_BATCHES,
    QUICK_BATCHES_PER_S,
    BatchingInterval,
    receiving_rate,
)


def test_few_are_received_at_once_and_many_at_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []
    stated: list[int] = []

    def take_nowait() -> list[int]:
        found, stated[:] = stated[:], []
        return found

    async def rests(count: int) -> None:
        begin = trio.current_time()
        for _ in range(count):
            stated.append(1)
            assert (await beat.gather(take_nowait) or take_nowait()) == [1]
        took.append(trio.current_time() - begin)

    async def body() -> None:
        nonlocal beat
        monkeypatch.setattr(outbox, "monotonic", trio.current_time)
        beat = BatchingInterval()
        await rests(BATCHES_AT_ONCE)
        await rests(100)
        await trio.sleep(10)
        await rests(BATCHES_AT_ONCE)
        await rests(1)
        begin = trio.current_time()
        assert await beat.gather(take_nowait) == []
        assert trio.current_time() - begin > IDLE_BATCHES / BATCHES_PER_S

    beat = BatchingInterval()
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
    assert took[0] == took[2] == 0
    assert took[1] == pytest.approx(100 / BATCHES_PER_S)


@pytest.mark.parametrize(
    ("cores", "senders", "wanted"),
    [
        (2, 1, BATCHES_PER_S),
        (16, 4, QUICK_BATCHES_PER_S),
        (16, FEW_SENDERS + 1, BATCHES_PER_S),
        (64, 256, BATCHES_PER_S),
    ],
)
def test_few_senders_are_received_sooner_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, senders: int, wanted: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert receiving_rate(senders) == wanted


@pytest.mark.parametrize(("batches_per_s", "latest_s"), [(BATCHES_PER_S, 0.004), (QUICK_BATCHES_PER_S, 0.001)])
def test_the_last_word_of_a_short_update_waits_for_a_beat_at_most(
    monkeypatch: pytest.MonkeyPatch, batches_per_s: float, latest_s: float
) -> None:
    """Four senders send a word every two and a half milliseconds for thirty, as they do with units of a gigabyte."""
    stated: list[float] = []
    late: list[float] = []
    more = Notice()

    def take_nowait() -> list[float]:
        found, stated[:] = stated[:], []
        return found

    async def speak(begin_s: float) -> None:
        await trio.sleep(begin_s)
        for _ in range(12):
            stated.append(trio.current_time())
            more.notify()
            await trio.sleep(0.0025)

    async def body() -> None:
        monkeypatch.setattr(outbox, "monotonic", trio.current_time)
        beat = BatchingInterval(batches_per_s)
        async with trio.open_nursery() as nursery:
            for sender in range(4):
                nursery.start_soon(speak, 0.0006 * sender)
            while len(late) < 4 * 12:
                received = await beat.gather(take_nowait)
                while not (received := received or take_nowait()):
                    await more.wait()
                late.extend(trio.current_time() - when for when in received)

    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
    assert latest_s / 2 < max(late) <= latest_s + 0.0001
