"""Continuous batching on trio: requests join and leave between passes, and take nothing with them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")
pytest.importorskip("prometheus_client", reason="the batcher counts")

import trio  # noqa: E402
import trio.testing  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402
from runner_cases import alone, make_runner, make_scheduler, member_of, prompt_of  # noqa: E402

from asyncfabric.errors import BrokenError, BusyError, ClosedError  # noqa: E402
from asyncfabric_services.runner.batch import TokenSpan  # noqa: E402
from asyncfabric_services.runner.batcher import Batcher  # noqa: E402
from asyncfabric_services.runner.meter import RunnerMeter  # noqa: E402
from asyncfabric_services.runner.page_supply import FreeList  # noqa: E402
from asyncfabric_services.runner.runner import Runner  # noqa: E402
from asyncfabric_services.runner.scheduler import Scheduler  # noqa: E402


class GatedRunner(Runner):
    """A runner whose passes wait for a permit while the gate is shut, and report that they began."""

    def __init__(self, inner: Runner) -> None:
        self.__dict__.update(inner.__dict__)
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[Sequence[TokenSpan]] = []
        self.failing = False

    def step(self, spans: Sequence[TokenSpan]) -> Any:
        self.passes.append(spans)
        assert self.gate.wait(30)
        if self.failing:
            raise MemoryError("no room for a matrix")
        return super().step(spans)


@asynccontextmanager
async def running(pages: int = 320, **limits: int) -> AsyncIterator[tuple[Batcher, GatedRunner, Scheduler, FreeList]]:
    scheduler, supply = make_scheduler(pages, **limits)
    runner = GatedRunner(make_runner(pages=pages))
    batcher = Batcher(runner, scheduler, RunnerMeter(CollectorRegistry(), scheduler, supply))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(batcher.run)
        yield batcher, runner, scheduler, supply
        nursery.cancel_scope.cancel()
    assert supply.free == supply.pages, "pages leaked"
    assert not scheduler.members()


async def passes(runner: GatedRunner, count: int) -> None:
    """Wait until `count` passes have begun."""
    while len(runner.passes) < count:
        await trio.lowlevel.checkpoint()


@pytest.mark.trio
async def test_requests_that_come_and_go_get_the_answers_of_the_lonely() -> None:
    prompts = [prompt_of(length) for length in (1, 5, 40, 17, 90, 33, 2, 64)]
    answers: dict[int, list[int]] = {}

    async def ask(index: int, batcher: Batcher) -> None:
        for _ in range(index * 7):
            await trio.lowlevel.checkpoint()  # they do not all come at once
        async with batcher.generate(member_of(prompts[index], 6 + index)) as tokens:
            answers[index] = [token async for token in tokens]

    async with running() as (batcher, runner, _, _), trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(ask, index, batcher)
    assert max(len(spans) for spans in runner.passes) > 1, "nothing was batched"
    lonely = make_runner()
    assert answers == {index: alone(lonely, prompt, 6 + index) for index, prompt in enumerate(prompts)}


@pytest.mark.parametrize("_", range(8))  # trio runs tasks in random order
@pytest.mark.trio
async def test_a_request_that_leaves_in_a_pass_keeps_its_pages_until_the_pass_is_over(_: int) -> None:
    async with running() as (batcher, runner, scheduler, supply):
        runner.gate.clear()
        left = trio.Event()

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                async with batcher.generate(member_of(prompt_of(40), 100)) as tokens:
                    async for _ in tokens:
                        pass
            left.set()

        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, scope)
            await passes(runner, 1)
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert not left.is_set(), "left while a pass wrote to its pages"
            assert supply.free < supply.pages
            runner.gate.set()
            await left.wait()
            assert supply.free == supply.pages
            assert scheduler.running == 0
            assert len(runner.passes) == 1, "a request that leaves was taken along into the next pass"


@pytest.mark.trio
async def test_leaving_disturbs_nobody_and_lets_the_next_one_in() -> None:
    async with running(most_running=2) as (batcher, _, scheduler, _):
        answers: dict[str, list[int]] = {}

        async def ask(name: str, prompt: list[int], count: int, stop_after: int) -> None:
            async with batcher.generate(member_of(prompt, count)) as tokens:
                answers[name] = []
                async for token in tokens:
                    answers[name].append(token)
                    if len(answers[name]) == stop_after:
                        break

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "stays", prompt_of(30), 25, 999)
            nursery.start_soon(ask, "leaves", prompt_of(20), 900, 3)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "waits", prompt_of(10), 5, 999)
        assert scheduler.waiting == 0
    lonely = make_runner()
    assert answers["stays"] == alone(lonely, prompt_of(30), 25)
    assert answers["waits"] == alone(lonely, prompt_of(10), 5)
    assert len(answers["leaves"]) == 3


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.trio
async def test_a_prompt_whose_pages_came_from_elsewhere_is_continued(count: int) -> None:
    """What a decode node does: it leased the pages, another runner wrote them, and the last logits came along."""
    prompt, theirs, ours = prompt_of(50), [5, 9, 2, 7], [300, 17, 44, 203]
    other = make_runner()
    logits = other.prefill(prompt, theirs, chunk_tokens=16)
    async with running() as (batcher, runner, _, supply):
        lent = supply.lease(320)  # the pool of a decode node is not the scheduler's to lend
        runner.pool[:, ours] = other.pool[:, theirs]
        member = member_of(prompt, count, table=ours, computed=50)
        first = member.take(logits)
        async with batcher.generate(member) as tokens:
            rest = [token async for token in tokens]
        assert member.table == ours
        supply.release(lent)
    assert [first, *rest] == alone(make_runner(), prompt, count)


@pytest.mark.trio
async def test_a_pass_that_fails_harms_its_requests_and_not_the_next() -> None:
    async with running() as (batcher, runner, _, supply):
        runner.failing = True
        with pytest.raises(BrokenError, match="no room for a matrix"):
            async with batcher.generate(member_of([1, 2], 5)) as tokens:
                async for _ in tokens:
                    pass
        runner.failing = False
        assert supply.free == supply.pages
        async with batcher.generate(member_of([1, 2], 5)) as tokens:
            assert [token async for token in tokens] == alone(make_runner(), [1, 2], 5)


@pytest.mark.trio
async def test_answers_end_at_an_end_token_and_without_it() -> None:
    whole = alone(make_runner(), prompt_of(9), 12)
    end = whole[4]
    async with (
        running() as (batcher, _, _, _),
        batcher.generate(member_of(prompt_of(9), 12, end_tokens=frozenset([end]))) as tokens,
    ):
        assert [token async for token in tokens] == whole[: whole.index(end)]


@pytest.mark.trio
async def test_refusals_come_at_the_door() -> None:
    async with running(pages=4, most_running=1, most_waiting=0) as (batcher, _, _, supply):
        with pytest.raises(ValueError, match="the pool has 4"):
            async with batcher.generate(member_of([1] * 100, 5)):
                pass
        async with batcher.generate(member_of([1], 5)):
            with pytest.raises(BusyError):
                async with batcher.generate(member_of([1], 5)):
                    pass
        assert supply.free == 4


@pytest.mark.trio
async def test_when_the_runner_stops_nobody_waits_for_ever() -> None:
    scheduler, supply = make_scheduler()
    batcher = Batcher(make_runner(), scheduler)
    async with trio.open_nursery() as nursery:
        inner = trio.CancelScope()

        async def run() -> None:
            with inner:
                await batcher.run()

        nursery.start_soon(run)
        with pytest.raises(ClosedError, match="stopped while it computed"):
            async with batcher.generate(member_of([1], 2000)) as tokens:
                async for _ in tokens:
                    inner.cancel()
    with pytest.raises(ClosedError, match="has stopped"):
        async with batcher.generate(member_of([1], 5)):
            pass
    assert supply.free == supply.pages


@pytest.mark.trio
async def test_the_loop_answers_while_a_pass_computes() -> None:
    async with running() as (batcher, runner, _, _), batcher.generate(member_of([1], 1)) as tokens:
        runner.gate.clear()
        await passes(runner, 1)
        for _ in range(100):
            await trio.lowlevel.checkpoint()  # would hang if the pass held the loop
        runner.gate.set()
        assert len([token async for token in tokens]) == 1
