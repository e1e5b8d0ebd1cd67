"""Any sequence of joins, passes and leaves: pages are never shared or lost, order is kept, everyone finishes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from runner_cases import make_scheduler, member_of  # noqa: E402

from asyncfabric.errors import BusyError  # noqa: E402
from asyncfabric_services.runner.scheduler import ScheduledRequest, Scheduler  # noqa: E402

STEP = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 60), st.integers(1, 8)),
    st.tuples(st.just("pass"), st.just(0), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
)


def check(scheduler: Scheduler, waiting_order: list[ScheduledRequest], free: int, pages: int) -> None:
    leased = [page for member in scheduler.members() for page in member.table]
    assert len(leased) == len(set(leased)) == pages - free
    holders = [member for member in waiting_order if member.table]
    assert holders == waiting_order[: len(holders)], "somebody overtook"


def one_pass(scheduler: Scheduler, chunk_tokens: int) -> None:
    plan = scheduler.plan()
    assert all(not member.finished and span.end <= len(member.tokens) for member, span in plan)
    assert all(list(span.tokens) == member.tokens[span.start : span.end] for member, span in plan)
    assert sum(len(span.tokens) for _, span in plan if len(span.tokens) > 1) <= chunk_tokens
    scheduler.complete(plan, torch.zeros(len(plan), 4))


@settings(max_examples=150)
@given(st.lists(STEP, max_size=40), st.integers(1, 9), st.integers(1, 40))
def test_pages_order_and_ends(steps: list[tuple[str, int, int]], page_tokens: int, chunk_tokens: int) -> None:
    scheduler, supply = make_scheduler(30, page_tokens, chunk_tokens=chunk_tokens, most_running=4, most_waiting=5)
    there: list[ScheduledRequest] = []
    for what, first, second in steps:
        if what == "join":
            member = member_of([1] * first, second)
            try:
                scheduler.join(member)
            except BusyError:
                assert scheduler.waiting == 5
                assert not member.table
            except ValueError:
                assert first + second - 1 > 30 * page_tokens
            else:
                there.append(member)
        elif what == "pass":
            one_pass(scheduler, chunk_tokens)
        elif there:
            scheduler.leave(there.pop(first % len(there)))
        check(scheduler, there, supply.free, supply.pages)
    for _ in range(2000):
        for member in [one for one in there if one.finished]:
            there.remove(member)
            scheduler.leave(member)
        if not there:
            break
        one_pass(scheduler, chunk_tokens)
    assert not there, "a request never finished"
    assert supply.free == supply.pages
