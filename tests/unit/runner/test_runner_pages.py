"""Pages of the runner: where they lie, who may use them, when others may push them, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from runner_cases import make_runner, make_scheduler, member_of, prompt_of, table_of, tiny  # noqa: E402

from asyncfabric.errors import BusyError  # noqa: E402
from asyncfabric_services.runner.batch import TokenSpan  # noqa: E402
from asyncfabric_services.runner.page_shape import PageShape  # noqa: E402
from asyncfabric_services.runner.page_supply import FreeList  # noqa: E402
from asyncfabric_services.runner.runner import Runner, chunks  # noqa: E402

PROMPT = prompt_of(70)


def test_the_pool_is_a_view_of_memory_that_somebody_else_owns() -> None:
    loaded = tiny()
    memory = torch.zeros(loaded.shape.pool_bytes(8), dtype=torch.uint8)
    runner = Runner(loaded, loaded.shape.view(memory, 8))
    runner.prefill(PROMPT, [6, 1, 3, 0, 2], chunk_tokens=64)
    assert int(torch.count_nonzero(memory)) > 0
    in_pages = memory.view(loaded.shape.layers, 8, loaded.shape.page_bytes)
    used = in_pages.count_nonzero(dim=2) > 0
    assert used.nonzero()[:, 1].unique().tolist() == [0, 1, 2, 3, 6]


@pytest.mark.parametrize("page_tokens", [7, 16])
def test_pages_copied_elsewhere_decode_the_same(page_tokens: int) -> None:
    """What a fabric does: whole pages go to other ids of another pool; the rest there stays poison."""
    here, there = make_runner(page_tokens), make_runner(page_tokens)
    table = table_of(len(PROMPT) + 1, page_tokens)
    target = table_of(len(PROMPT) + 1, page_tokens, seed=4)
    logits = here.prefill(PROMPT, table, chunk_tokens=32)
    there.pool[:, target] = here.pool[:, table]
    token = int(logits.argmax())
    ours = here.step([TokenSpan([token], len(PROMPT), table)])
    assert torch.equal(there.step([TokenSpan([token], len(PROMPT), target)]), ours)
    there.pool[:, target[0]] = float("nan")
    assert torch.isnan(there.step([TokenSpan([token], len(PROMPT), target)])).any()


@pytest.mark.parametrize("chunk_tokens", [5, 16, 64, 100])
def test_the_hook_reports_each_layer_of_each_chunk_once_its_pages_are_written(chunk_tokens: int) -> None:
    reported: list[tuple[int, range]] = []
    runner, reference = make_runner(), make_runner()
    table = table_of(len(PROMPT), 16)
    reference.prefill(PROMPT, table, chunk_tokens=chunk_tokens)

    def after_layer(layer: int, positions: range) -> None:
        reported.append((layer, positions))
        for position in positions:
            place = (layer, table[position // 16], slice(None), slice(None), position % 16)
            assert torch.equal(runner.pool[place], reference.pool[place])

    runner.prefill(PROMPT, table, chunk_tokens=chunk_tokens, after_layer=after_layer)
    expected = [(layer, range(*chunk)) for chunk in chunks(len(PROMPT), chunk_tokens) for layer in range(3)]
    assert reported == expected


def test_what_the_hook_raises_ends_the_prefill() -> None:
    class Stop(Exception):
        pass

    reported = []

    def after_layer(layer: int, positions: range) -> None:
        reported.append(layer)
        if len(reported) == 5:
            raise Stop

    with pytest.raises(Stop):
        make_runner().prefill(PROMPT, table_of(70, 16), chunk_tokens=16, after_layer=after_layer)
    assert reported == [0, 1, 2, 0, 1]


def test_a_prefill_can_start_behind_pages_that_are_there() -> None:
    runner, table = make_runner(), table_of(70, 16)
    whole = runner.prefill(PROMPT, table, chunk_tokens=64)
    assert torch.equal(runner.prefill(PROMPT, table, chunk_tokens=64, start=48), whole)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (TokenSpan([1] * 20, 0, [3]), "token 19 is beyond the 1 leased pages of 16 tokens"),
        (TokenSpan([1], 16, [3]), "token 16 is beyond the 1 leased pages"),
        (TokenSpan([], 0, [3]), "a span needs a token"),
        (TokenSpan([1], -1, [3]), "a start >= 0"),
        (TokenSpan([1], 0, [320]), r"page ids must be in 0\.\.319"),
        (TokenSpan([1], 0, [-1]), r"page ids must be in 0\.\.319"),
    ],
)
def test_spans_that_their_pages_cannot_hold_are_refused(span: TokenSpan, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_runner().step([span])


def test_an_empty_pass_and_an_empty_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one span"):
        make_runner().step([])
    with pytest.raises(ValueError, match="start < total"):
        make_runner().prefill([], [1], chunk_tokens=4)


def test_memory_of_another_size_is_refused() -> None:
    shape = PageShape(2, 2, 8, 16, "float32")
    with pytest.raises(ValueError, match="must be 16384 flat bytes"):
        shape.view(torch.zeros(16383, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="kv_heads must be at least 1"):
        PageShape(2, 0, 8, 16, "float32")
    with pytest.raises(ValueError, match="dtype must be one of"):
        PageShape(2, 1, 8, 16, "int8")
    with pytest.raises(ValueError, match="the pool must be"):
        Runner(tiny(), torch.zeros(3, 4, 2, 2, 15, 32))


def test_the_free_list_knows_its_pages() -> None:
    supply = FreeList(6)
    taken = supply.lease(4)
    assert len(set(taken)) == 4
    with pytest.raises(BusyError, match="3 pages wanted, 2 of 6 are free"):
        supply.lease(3)
    supply.release(taken)
    with pytest.raises(ValueError, match=f"page {taken[0]} is not leased"):
        supply.release(taken[:1])
    assert supply.lease(2) == [4, 5], "the pages that were free longest go first"


def test_requests_wait_in_order_for_pages() -> None:
    scheduler, supply = make_scheduler(pages=10, page_tokens=16)
    first, long, short = (member_of(prompt_of(length), 1) for length in (100, 150, 10))
    for member in (first, long, short):
        scheduler.join(member)
    assert (scheduler.running, scheduler.waiting, supply.free) == (1, 2, 3)
    assert [member for member, _ in scheduler.plan()] == [first], "the short one would starve the long one"
    scheduler.leave(first)
    assert [member for member, _ in scheduler.plan()] == [long]
    scheduler.leave(short)
    scheduler.leave(long)
    assert (scheduler.running, scheduler.waiting, supply.free) == (0, 0, 10)


def test_one_too_many_is_refused_and_leaves_no_trace() -> None:
    scheduler, supply = make_scheduler(pages=10, most_running=1, most_waiting=1)
    scheduler.join(member_of([1], 1))
    scheduler.join(member_of([1], 1))
    with pytest.raises(BusyError, match="1 requests run and 1 wait"):
        scheduler.join(member_of([1], 1))
    assert len(scheduler.members()) == 2
    with pytest.raises(ValueError, match="need 11 pages, the pool has 10"):
        scheduler.join(member_of([1] * 160, 2))
    assert supply.free == 9


def test_pages_that_were_given_must_do() -> None:
    scheduler, supply = make_scheduler(pages=10)
    with pytest.raises(ValueError, match="3 pages are needed, 2 were given"):
        scheduler.join(member_of([1] * 32, 2, table=[0, 1]))
    scheduler.join(member_of([1] * 32, 1, table=[0, 1]))
    assert supply.free == 10
    for computed, table in ((3, []), (-1, [0]), (33, [0, 1, 2])):
        with pytest.raises(ValueError, match="computed must be in"):
            member_of([1] * 32, 1, table=table, computed=computed)


def test_the_last_token_of_an_answer_needs_no_place() -> None:
    scheduler, supply = make_scheduler(pages=10)
    scheduler.join(member_of([1] * 15, 2))
    assert supply.free == 9
    scheduler.join(member_of([1] * 16, 2))
    assert supply.free == 7


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    scheduler, _ = make_scheduler(chunk_tokens=32)
    runner = make_runner()
    talker = member_of([5, 6], 50)
    scheduler.join(talker)
    scheduler.complete(scheduler.plan(), runner.step([span for _, span in scheduler.plan()]))
    long, longer = member_of(prompt_of(100), 3), member_of(prompt_of(90), 3)
    scheduler.join(long)
    scheduler.join(longer)
    seen = []
    while longer.computed < 90:
        plan = scheduler.plan()
        seen.append({id(member): len(span.tokens) for member, span in plan})
        scheduler.complete(plan, runner.step([span for _, span in plan]))
    assert all(widths[id(talker)] == 1 for widths in seen)
    assert [widths.get(id(long), 0) for widths in seen][:4] == [32, 32, 32, 4]
    assert seen[3][id(longer)] == 28
    assert all(sum(count for count in widths.values() if count > 1) <= 32 for widths in seen)


@settings(deadline=None)
@given(total=st.integers(1, 5000), size=st.integers(1, 900))
def test_chunks_cover_the_prompt(total: int, size: int) -> None:
    parts = list(chunks(total, size))
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert all(0 < end - start <= size for start, end in parts)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= start < total"):
        list(chunks(0, 4))
