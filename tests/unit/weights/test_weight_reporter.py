"""Reporter: every row is reported once, with what was written meanwhile, also what is added at the last moment."""

from __future__ import annotations

import anyio
import pytest
import trio
import trio.testing

from asyncfabric.weights import writing as reporting
from asyncfabric.weights.plan.batch import ReportShare
from asyncfabric.weights.writing import LATEST_S, Gate, KeyedMemory, Reporter, shares_of

Reported = list[tuple[str, list[int], list[int], int]]


def test_rows_of_one_moment_are_one_word_for_each_receiver() -> None:
    reported: Reported = []

    async def report(*word: object) -> None:
        reported.append(word)  # type: ignore[arg-type]

    async def body() -> None:
        reporter = Reporter(report)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reporter.run)
            for row in range(3):
                reporter.add("a", row, 10 * row, after=2 * row)
                await anyio.lowlevel.checkpoint()
            reporter.add("b", 3, 30)
            reporter.finish()

    anyio.run(body, backend="trio")
    assert reported == [("a", [0, 1, 2], [0, 10, 20], 4), ("b", [3], [30], 0)]


def test_what_is_added_while_a_word_is_on_its_way_is_reported_before_the_end() -> None:
    reported: Reported = []

    async def body() -> None:
        speaks, go = anyio.Event(), anyio.Event()

        async def report(*word: object) -> None:
            reported.append(word)  # type: ignore[arg-type]
            speaks.set()
            await go.wait()

        reporter = Reporter(report)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reporter.run)
            reporter.add("a", 0, 1)
            await speaks.wait()
            reporter.add("a", 1, 2)
            reporter.finish()
            go.set()

    anyio.run(body, backend="trio")
    assert reported == [("a", [0], [1], 0), ("a", [1], [2], 0)]


def test_nothing_to_report_ends_at_once() -> None:
    async def body() -> None:
        async def report(*_: object) -> None:
            raise AssertionError("there was nothing to report")

        reporter = Reporter(report)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reporter.run)
            await anyio.lowlevel.checkpoint()
            reporter.finish()

    anyio.run(body, backend="trio")


def test_a_share_is_reported_whatever_the_number_of_units_and_the_last_words_are_worth_less() -> None:
    for units in (16, 160, 1600):
        share, words, last = ReportShare(160 << 20, 32 << 20), 0, 0
        for _ in range(units):
            last += (160 << 20) // units
            if share.add((160 << 20) // units):
                words, last = words + 1, 0
        assert 5 <= words <= 9, f"{units} units were reported in {words} words"
        assert last <= 4 << 20, f"{last} bytes wait for the last word"


def test_who_asks_for_no_share_learns_of_each_unit_and_first_words_come_in_turn() -> None:
    assert all(ReportShare(1000, 0).add(10) for _ in range(3))
    firsts = []
    for imm in range(16):
        gate = Gate(KeyedMemory([]), imm, 1000)
        share = shares_of({"a": gate}, {"a": 100_000})("a")
        assert share is not None
        firsts.append(next(number for number in range(1, 200) if share.add(10)))
    assert max(firsts) <= 100 and len(set(firsts)) >= 12, firsts
    assert sorted(firsts)[4] <= 45 and sorted(firsts)[11] >= 55, "they are spread over the share"


def test_a_word_that_is_not_due_is_reported_in_time_and_what_is_left_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: Reported = []
    monkeypatch.setattr(reporting, "monotonic", trio.current_time)

    async def body() -> None:
        received = anyio.Event()

        async def report(*word: object) -> None:
            reported.append(word)  # type: ignore[arg-type]
            received.set()

        reporter = Reporter(report, {"a": ReportShare(1 << 30, 1 << 20)}.get)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reporter.run)
            reporter.add("a", 0, 1, 10)
            await anyio.sleep(LATEST_S / 2)
            assert not reported
            with anyio.fail_after(5):
                await received.wait()
            reporter.add("a", 1, 2, 1 << 20)
            reporter.add("a", 2, 3, 10)
            reporter.finish()

    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))
    assert reported == [("a", [0], [1], 0), ("a", [1, 2], [2, 3], 0)]
