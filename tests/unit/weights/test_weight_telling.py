"""Reporter: every row is told once, together with what was written meanwhile, also what is added at the last moment."""

from __future__ import annotations

import anyio
import pytest
import trio
import trio.testing

from asyncfabric import RegionKey
from asyncfabric.weights import writing as telling
from asyncfabric.weights.plan.batch import Share
from asyncfabric.weights.writing import LATEST_S, Gate, Reporter, shares_of

Told = list[tuple[str, list[int], list[int], int]]


def test_rows_of_one_moment_are_one_word_for_each_receiver() -> None:
    told: Told = []

    async def tell(*word: object) -> None:
        told.append(word)  # type: ignore[arg-type]

    async def body() -> None:
        teller = Reporter(tell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            for row in range(3):
                teller.add("a", row, 10 * row, after=2 * row)
                await anyio.lowlevel.checkpoint()
            teller.add("b", 3, 30)
            teller.finish()

    anyio.run(body, backend="trio")
    assert told == [("a", [0, 1, 2], [0, 10, 20], 4), ("b", [3], [30], 0)]


def test_what_is_added_while_a_word_is_on_its_way_is_told_before_the_end() -> None:
    told: Told = []

    async def body() -> None:
        speaks, go = anyio.Event(), anyio.Event()

        async def tell(*word: object) -> None:
            told.append(word)  # type: ignore[arg-type]
            speaks.set()
            await go.wait()

        teller = Reporter(tell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            teller.add("a", 0, 1)
            await speaks.wait()
            teller.add("a", 1, 2)
            teller.finish()
            go.set()

    anyio.run(body, backend="trio")
    assert told == [("a", [0], [1], 0), ("a", [1], [2], 0)]


def test_nothing_to_tell_ends_at_once() -> None:
    async def body() -> None:
        async def tell(*_: object) -> None:
            raise AssertionError("there was nothing to tell")

        teller = Reporter(tell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            await anyio.lowlevel.checkpoint()
            teller.finish()

    anyio.run(body, backend="trio")


def test_a_share_is_told_whatever_the_number_of_units_and_the_last_words_are_worth_less() -> None:
    for units in (16, 160, 1600):
        share, words, last = Share(160 << 20, 32 << 20), 0, 0
        for _ in range(units):
            last += (160 << 20) // units
            if share.add((160 << 20) // units):
                words, last = words + 1, 0
        assert 5 <= words <= 9, f"{units} units were told in {words} words"
        assert last <= 4 << 20, f"{last} bytes wait for the last word"


def test_who_asks_for_no_share_hears_of_each_unit_and_first_words_come_in_turn() -> None:
    assert all(Share(1000, 0).add(10) for _ in range(3))
    firsts = []
    for imm in range(16):
        gate = Gate(RegionKey.__new__(RegionKey), imm, 1000)
        share = shares_of({"a": gate}, {"a": 100_000})("a")
        assert share is not None
        firsts.append(next(number for number in range(1, 200) if share.add(10)))
    assert max(firsts) <= 100 and len(set(firsts)) >= 12, firsts
    assert sorted(firsts)[4] <= 45 and sorted(firsts)[11] >= 55, "they are spread over the share"


def test_a_word_that_is_not_due_is_told_in_time_and_what_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    monkeypatch.setattr(telling, "monotonic", trio.current_time)

    async def body() -> None:
        heard = anyio.Event()

        async def tell(*word: object) -> None:
            told.append(word)  # type: ignore[arg-type]
            heard.set()

        teller = Reporter(tell, {"a": Share(1 << 30, 1 << 20)}.get)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            teller.add("a", 0, 1, 10)
            await anyio.sleep(LATEST_S / 2)
            assert not told
            with anyio.fail_after(5):
                await heard.wait()
            teller.add("a", 1, 2, 1 << 20)
            teller.add("a", 2, 3, 10)
            teller.finish()

    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
    assert told == [("a", [0], [1], 0), ("a", [1, 2], [2, 3], 0)]
