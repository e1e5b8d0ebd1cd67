"""The rounding rule: a request's logits are the same bits alone and in any company, for any chunk and page size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from runner_cases import alone, make_runner, make_scheduler, member_of, prompt_of, table_of  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from asyncfabric_services.runner.batch import TokenSpan  # noqa: E402
from asyncfabric_services.runner.model import TINY, ModelChoice, load_model  # noqa: E402
from asyncfabric_services.runner.row_rule import RowRule, measure_rule  # noqa: E402
from asyncfabric_services.runner.runner import Runner  # noqa: E402

PROMPT = prompt_of(203)
NEAR_TIE = 1e-4  # of logits whose spread is about 1; rounding moves them by some 1e-6


@pytest.fixture(scope="module")
def expected() -> Any:
    return make_runner().prefill(PROMPT, table_of(len(PROMPT), 16), chunk_tokens=10_000)


@pytest.mark.parametrize("page_tokens", [1, 7, 8, 64])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 50, 512])
def test_logits_do_not_depend_on_page_and_chunk_size(expected: Any, page_tokens: int, chunk_tokens: int) -> None:
    runner = make_runner(page_tokens)
    logits = runner.prefill(PROMPT, table_of(len(PROMPT), page_tokens), chunk_tokens=chunk_tokens)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("others", [1, 2, 3, 7, 20])
def test_logits_do_not_depend_on_the_other_requests_of_a_pass(expected: Any, others: int) -> None:
    runner = make_runner(8, pages=900)
    table = table_of(len(PROMPT), 8, pages=100)
    runner.prefill(PROMPT[:-1], table, chunk_tokens=64)
    draws = random.Random(others)
    spans = [TokenSpan(PROMPT[-1:], len(PROMPT) - 1, table)]
    for index in range(others):  # some decode, some are prefilled, all in the pass that decodes ours
        length = draws.choice([1, 3, 40, 100])
        spans.append(TokenSpan(prompt_of(length, index), 0, list(range(100 + 20 * index, 120 + 20 * index))))
    draws.shuffle(spans)
    logits = runner.step(spans)
    ours = next(index for index, span in enumerate(spans) if span.table is table)
    assert torch.equal(logits[ours], expected)


def test_the_rule_of_strict_tiles_gives_the_same_bits_too() -> None:
    """What machines get where no unit keeps the bits."""
    runner = make_runner(choice=TINY)
    strict = RowRule()
    for module in runner.loaded.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = (
                lambda rows, module=module: strict.linear(  # type: ignore[misc]
                    rows.reshape(-1, rows.shape[-1]), module.weight
                ).view(*rows.shape[:-1], -1)
            )
    runner.rule = strict
    first = runner.prefill(PROMPT, table_of(len(PROMPT), 16), chunk_tokens=10_000)
    again = runner.prefill(PROMPT, table_of(len(PROMPT), 16, seed=1), chunk_tokens=7)
    make_runner(choice=TINY)  # puts the measured rule back into the shared model
    assert torch.equal(first, again)


def test_a_machine_that_keeps_no_bits_gets_strict_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda rows, weight: linear(rows, weight) * (1 + 1e-6 * rows.shape[0])
    )
    assert measure_rule([torch.ones(8, 8)], 2, 8) == RowRule(16, 16)


def test_products_are_padded_and_cut_as_the_rule_states() -> None:
    rows, weight = torch.randn(37, 8), torch.randn(5, 8)
    for rule in (RowRule(4, 8), RowRule(16, 16), RowRule(4, 512)):
        assert torch.allclose(rule.linear(rows, weight), rows @ weight.T, atol=1e-6)
        assert torch.allclose(rule.product(rows[None], weight.T[None])[0], rows @ weight.T, atol=1e-6)
    with pytest.raises(ValueError, match="multiple of unit"):
        RowRule(4, 10)


def plain_answer(model: Any, prompt: list[int], count: int) -> Iterator[tuple[int, float]]:
    """Yield the greedy tokens of transformers alone, with the distance of the two largest logits."""
    cache, fed = DynamicCache(config=model.config), prompt
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
            best = logits.topk(2)
            yield int(best.indices[0]), float(best.values[0] - best.values[1])
            fed = [int(best.indices[0])]


@pytest.mark.slow
def test_batched_answers_are_those_of_one_process_for_60_prompts() -> None:
    """Against plain transformers, one request at a time; and against the runner with nothing else in the batch."""
    choice = ModelChoice(layers=2, hidden=64, query_heads=4, kv_heads=2, max_tokens=4096)
    draws = random.Random(5)
    lengths = [draws.randint(1, 120) for _ in range(56)] + [draws.randint(120, 2000) for _ in range(4)]
    draws.shuffle(lengths)
    members = [member_of(prompt_of(length, index), draws.randint(1, 12)) for index, length in enumerate(lengths)]
    prompts = [list(member.tokens) for member in members]
    runner = make_runner(8, pages=600, choice=choice)
    scheduler, supply = make_scheduler(600, 8, chunk_tokens=150, most_running=12)
    widths = set()
    joining = list(members)
    while joining or scheduler.running:
        for _ in range(min(len(joining), draws.randint(0, 3))):
            scheduler.join(joining.pop())
        plan = scheduler.plan()
        widths.add(len(plan))
        if plan:
            scheduler.complete(plan, runner.step([span for _, span in plan]))
        for member in [one for one in scheduler.members() if one.finished]:
            scheduler.leave(member)
    assert supply.free == supply.pages
    assert max(widths) >= 8
    plain: LlamaForCausalLM = load_model(choice, page_tokens=8).model
    ties = 0
    for member, prompt in zip(members, prompts, strict=True):
        answer = member.tokens[len(prompt) :]
        assert len(answer) == member.max_tokens
        for ours, (theirs, distance) in zip(answer, plain_answer(plain, prompt, len(answer)), strict=True):
            if ours != theirs:  # the last bits of transformers depend on shapes: only a tie may fall differently
                assert distance < NEAR_TIE
                ties += 1
                break
    assert ties <= 2
    for member, prompt in list(zip(members, prompts, strict=True))[:40]:
        assert member.tokens[len(prompt) :] == alone(runner, prompt, member.max_tokens)


def test_an_answer_computed_again_as_a_prompt_has_the_same_bits() -> None:
    """So a request can move to another node in the middle of its answer and go on as if nothing had been."""
    runner = make_runner()
    table = table_of(260, 16)
    logits = runner.prefill(PROMPT, table, chunk_tokens=64)
    tokens = list(PROMPT)
    for _ in range(30):
        tokens.append(int(logits.argmax()))
        logits = runner.step([TokenSpan(tokens[-1:], len(tokens) - 1, table)])[0]
    again = make_runner().prefill(tokens, table_of(260, 16, seed=9), chunk_tokens=50)
    assert torch.equal(again, logits)


def test_half_types_keep_their_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        loaded = load_model(TINY, page_tokens=8)
        loaded.model.to(dtype)
        shape = type(loaded.shape)(3, 2, 32, 8, str(dtype).removeprefix("torch."))
        fields = {name: getattr(loaded, name) for name in loaded.__dataclass_fields__} | {"shape": shape}
        memory = torch.full((shape.pool_bytes(64),), 255, dtype=torch.uint8)
        runner = Runner(type(loaded)(**fields), shape.view(memory, 64))
        first = runner.prefill(PROMPT, list(range(30)), chunk_tokens=300)
        assert not torch.isnan(first).any()
        assert torch.equal(first, runner.prefill(PROMPT, list(range(30, 60)), chunk_tokens=9))
