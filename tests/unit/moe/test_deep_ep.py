"""DeepEP's interface over an exchange: the ranks are threads of this process, each with a Buffer of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="DeepEP's tensors are torch's")
pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

from deep_ep_ranks import PATIENCE_S, Run, drawn_tokens, ranks_of  # noqa: E402

from asyncfabric.integrations import deep_ep  # noqa: E402
from asyncfabric.moe import MissingRankError  # noqa: E402
from asyncfabric.moe.fp8 import from_fp8, to_fp8  # noqa: E402

pytestmark = pytest.mark.slow
RANKS, EXPERTS, TOP_K, HIDDEN, MOST = 4, 12, 3, 256, 10
OWN = EXPERTS // RANKS
SOON_S = 1.5
"""A deadline that is meant to pass; what is asserted is who is named, not when."""


def opened(comm: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(None, comm=comm, max_tokens_per_rank=32, patience_s=PATIENCE_S)


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a function on all ranks at once."""
    with ranks_of(RANKS, opened) as run:
        yield run


def tokens_of(rank: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Tokens of a rank, their experts and weights; rank 2 has none, some choices are masked."""
    return drawn_tokens(rank, seed, 0 if rank == 2 else 4 + 2 * rank, HIDDEN, EXPERTS, TOP_K)


def arrived_at(rank: int, seed: int = 0) -> list[tuple[int, int]]:
    """(source, token) of the rows of a rank, in order."""
    return [
        (source, token)
        for source in range(RANKS)
        for token, chosen in enumerate(tokens_of(source, seed)[1].tolist())
        if any(each >= 0 and each // OWN == rank for each in chosen)
    ]


def dispatch(buffer: deep_ep.Buffer, seed: int = 0, *, topk: bool = True, fp8: bool = False, **more: Any) -> Any:
    x, idx, weights = tokens_of(buffer.rank, seed)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS)
    assert per_node is None
    event.current_stream_wait()
    assert per_rank.tolist() == in_rank.sum(0).tolist()
    assert per_expert.tolist() == [int((idx == each).sum()) for each in range(EXPERTS)]
    about = {"topk_idx": idx, "topk_weights": weights} if topk else {}
    return buffer.dispatch(
        to_fp8(x, 128) if fp8 else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **about,
        **more,
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("topk", [True, False], ids=["topk", "rows"])
@pytest.mark.usefixtures("default_dtype")
def test_normal_calls(run: Run, topk: bool, fp8: bool) -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        for seed in range(3):
            rows, idx, weights, counts, handle, event = dispatch(
                buffer, seed, topk=topk, fp8=fp8, expert_alignment=4, config=buffer.get_dispatch_config(RANKS)
            )
            event.current_stream_wait()
            places = arrived_at(buffer.rank, seed)
            sources = [tokens_of(rank, seed) for rank in range(RANKS)]
            sent = [to_fp8(x, 128) if fp8 else (x, None) for x, _, _ in sources]
            data = rows[0] if fp8 else rows
            assert len(data) == len(places)
            for row, (source, token) in enumerate(places):
                assert torch.equal(data[row].view(torch.uint8), sent[source][0][token].view(torch.uint8))
                if fp8:
                    assert torch.equal(rows[1][row], sent[source][1][token])
                if topk:
                    local = [each - buffer.rank * OWN for each in sources[source][1][token].tolist()]
                    assert idx[row].tolist() == [each if 0 <= each < OWN else -1 for each in local]
                    assert torch.equal(weights[row], sources[source][2][token].masked_fill(idx[row] < 0, 0.0))
            everyone = torch.cat([idx.reshape(-1) for _, idx, _ in sources])
            own = [int((everyone == buffer.rank * OWN + each).sum()) for each in range(OWN)]
            assert counts == [-(-each // 4) * 4 for each in own]
            if not topk:
                assert idx is None and weights is None
            outputs = from_fp8(*rows, torch.bfloat16) if fp8 else rows
            bias = torch.ones(len(tokens_of(buffer.rank, seed)[0]), HIDDEN, dtype=torch.bfloat16)
            sums, summed, _ = buffer.combine(
                outputs * (buffer.rank + 1), handle, topk_weights=weights, bias=(bias, bias)
            )
            check_sums(buffer.rank, seed, sums, outputs_of(sent, buffer.rank, fp8))
            if topk:
                assert summed is not None
                _, mine, given = sources[buffer.rank]
                assert torch.equal(summed, given.masked_fill(mine < 0, 0.0)), "each weight comes back once"

    run(body)


def test_sums_of_fp32_rows_are_fp32(run: Run) -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = tokens_of(buffer.rank)
        x = x.float() / 3
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights)
        assert isinstance(rows, torch.Tensor) and handle is not None
        sums, _, _ = buffer.combine(rows, handle)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for far in range(RANKS):
            total += torch.where(in_rank[:, (buffer.rank + far) % RANKS, None], x, 0.0)
        assert torch.equal(sums, total)

    run(body)


def in_ranks(rank: int, seed: int) -> Any:
    idx = tokens_of(rank, seed)[1]
    return torch.stack([((idx >= 0) & (idx // OWN == each)).any(1) for each in range(RANKS)], 1)


def outputs_of(sent: Any, rank: int, fp8: bool) -> Any:
    return from_fp8(*sent[rank], torch.bfloat16) if fp8 else sent[rank][0]


def check_sums(rank: int, seed: int, sums: Any, x: Any) -> None:
    """Each rank gave its rows times its number + 1, in bf16; two biases of 1 were added."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for step in range(RANKS):
        other = (rank + step) % RANKS
        total += torch.where(in_ranks(rank, seed)[:, other, None], (x * (other + 1)).float(), 0.0)
    assert torch.equal(sums, (total.bfloat16().float() + 2).bfloat16())


@pytest.mark.usefixtures("default_dtype")
def test_a_layout_is_used_again_combined_twice_and_left_alone(run: Run) -> None:
    """An exchange wants one combine for each dispatch, in order; these calls do not keep to it."""

    def body(buffer: deep_ep.Buffer) -> None:
        handles = [dispatch(buffer, seed)[4] for seed in range(4)]  # two more than may be in flight
        for seed in (3, 0, 3, 1):
            rows, _, _, _, _, _ = buffer.dispatch(tokens_of(buffer.rank, seed)[0], handle=handles[seed])
            assert len(rows) == len(arrived_at(buffer.rank, seed))
            for factor in (1, 2):
                sums, _, _ = buffer.combine(rows * factor, handles[seed])
                times = in_ranks(buffer.rank, seed).sum(1, keepdim=True)
                assert torch.equal(sums, (tokens_of(buffer.rank, seed)[0].float() * times * factor).bfloat16())
        weights = torch.ones(len(arrived_at(buffer.rank, 2)), TOP_K)
        rows = dispatch(buffer, 2, topk=False)
        _, summed, _ = buffer.combine(rows[0], rows[4], topk_weights=weights)
        assert torch.equal(summed, in_ranks(buffer.rank, 2).sum(1, keepdim=True).expand(-1, TOP_K).float())

    run(body)


@pytest.mark.parametrize("hooks", [False, True], ids=["whole", "hooks"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.usefixtures("default_dtype")
def test_low_latency_calls(run: Run, fp8: bool, hooks: bool) -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        for seed in range(3):
            x, idx, weights = tokens_of(buffer.rank, seed)
            seen = torch.zeros(OWN, dtype=torch.int32)
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, MOST, EXPERTS, seen, use_fp8=fp8, round_scale=seed == 2, return_recv_hook=hooks
            )
            if hooks:
                assert hook is not None and not counts.any()
                hook()
                hook()
            data = from_fp8(*rows, torch.bfloat16) if fp8 else rows
            assert data.shape == (OWN, RANKS * MOST, HIDDEN)
            assert torch.equal(seen, counts)
            source, ranges, most, hidden, experts = handle
            assert (most, hidden, experts) == (MOST, HIDDEN, EXPERTS)
            for expert in range(OWN):
                number, at = buffer.rank * OWN + expert, 0
                for rank in range(RANKS):
                    given, chosen, _ = tokens_of(rank, seed)
                    wanted = torch.nonzero(chosen == number)[:, 0]
                    assert int(ranges[expert, rank]) == (at << 32) | len(wanted)
                    there = slice(at, at + len(wanted))
                    assert torch.equal(source[expert, there], wanted.int())
                    if fp8:
                        given = from_fp8(*to_fp8(given, 128, power_of_two=seed == 2), torch.bfloat16)
                    assert torch.equal(data[expert, there], given[wanted])
                    at += len(wanted)
                assert int(counts[expert]) == at
            outputs = data * (torch.arange(OWN) + buffer.rank * OWN + 1)[:, None, None].bfloat16()
            own = from_fp8(*to_fp8(x, 128, power_of_two=seed == 2), torch.bfloat16) if fp8 else x
            expected = torch.zeros(len(x), HIDDEN, dtype=torch.float32)
            for choice in range(TOP_K):
                made = (own * (idx[:, choice, None] + 1).bfloat16()).float()
                expected += torch.where(idx[:, choice, None] >= 0, made * weights[:, choice, None], 0.0)
            weights = weights.masked_fill(idx < 0, float("nan"))
            for zero_copy in (False, True, False):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:] = outputs
                out = torch.full((len(x), HIDDEN), float("nan")).bfloat16()
                sums, event, hook = buffer.low_latency_combine(
                    outputs, idx, weights, handle, zero_copy=zero_copy, return_recv_hook=hooks, out=out
                )
                event.current_stream_wait()
                if hook is not None:
                    hook()
                assert sums is out and torch.equal(sums, expected.bfloat16())

    run(body)


def test_two_batches_overlap_with_hooks(run: Run) -> None:
    """Each half of each batch goes out before the halves of the other come in."""

    def body(buffer: deep_ep.Buffer) -> None:
        batches = [tokens_of(buffer.rank, seed) for seed in range(2)]
        sent = [
            buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False, return_recv_hook=True)
            for x, idx, _ in batches
        ]
        for _, _, _, _, hook in sent:
            assert hook is not None
            hook()
        back = [
            buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
            for (rows, _, handle, _, _), (_, idx, weights) in zip(sent, batches, strict=True)
        ]
        for (sums, _, hook), (x, idx, weights) in reversed(list(zip(back, batches, strict=True))):
            assert hook is not None
            hook()
            total = torch.zeros(len(x), HIDDEN, dtype=torch.float32)
            for choice in range(TOP_K):
                total += torch.where(idx[:, choice, None] >= 0, x.float() * weights[:, choice, None], 0.0)
            assert torch.equal(sums, total.bfloat16())

    run(body)


def test_two_combines_of_one_dispatch_under_way_at_once(run: Run) -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = tokens_of(buffer.rank)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
        under_way = [
            buffer.low_latency_combine(rows * factor, idx, weights, handle, return_recv_hook=True) for factor in (1, 2)
        ]
        for factor, (sums, _, hook) in enumerate(under_way, 1):
            assert hook is not None
            hook()
            total = torch.zeros(len(x), HIDDEN, dtype=torch.float32)
            for choice in range(TOP_K):
                made = (x * factor).float() * weights[:, choice, None]
                total += torch.where(idx[:, choice, None] >= 0, made, 0.0)
            assert torch.equal(sums, total.bfloat16())

    run(body)


def test_a_rank_that_stays_away_is_named_and_the_others_go_on(run: Run) -> None:
    met = threading.Barrier(RANKS - 1)

    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = tokens_of(buffer.rank)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(rows, idx, weights, handle)
        if buffer.rank == 1:
            return
        handle.step.line._patience_s = SOON_S
        with pytest.raises(MissingRankError, match="rank 1 silent"):
            buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
        handle.step.line._patience_s = PATIENCE_S
        named = torch.full((RANKS,), 7, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(named)
        assert named.tolist() == [0, 1, 0, 0]
        buffer.low_latency_update_mask_buffer(1, True)
        buffer.low_latency_clean_mask_buffer()  # no call has gone on without it yet
        met.wait(PATIENCE_S)
        buffer.low_latency_update_mask_buffer(1, True)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
        sums, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
        total = torch.zeros(len(x), HIDDEN, dtype=torch.float32)
        for choice in range(TOP_K):
            there = (idx[:, choice, None] >= 0) & (idx[:, choice, None] // OWN != 1)
            total += torch.where(there, x.float() * weights[:, choice, None], 0.0)
        assert torch.equal(sums, total.bfloat16())
        buffer.low_latency_query_mask_buffer(named)
        assert named.tolist() == [0, 1, 0, 0]
        refused: list[tuple[Callable[[], Any], str]] = [
            (lambda: buffer.low_latency_update_mask_buffer(1, False), "rank 1 cannot come back"),
            (buffer.low_latency_clean_mask_buffer, r"ranks \[1\] cannot come back"),
            (lambda: buffer.low_latency_update_mask_buffer(buffer.rank, True), "must be another rank of 4"),
            (lambda: buffer.low_latency_query_mask_buffer(named[:2]), r"must be torch.int32 \[4\]"),
        ]
        for call, text in refused:
            with pytest.raises(ValueError, match=text):
                call()

    run(body)


def test_choices_of_another_shape_are_refused_before_anything_is_sent(run: Run) -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = torch.ones(6, HIDDEN).bfloat16(), torch.arange(TOP_K).repeat(6, 1), torch.ones(6, TOP_K)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
        of_tokens, of_choices = r"topk_idx must have the shape \[6, top_k\], got", "topk_weights must have the shape of"
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: buffer.low_latency_dispatch(x, idx[:2], MOST, EXPERTS, use_fp8=False), of_tokens),
            (lambda: buffer.low_latency_dispatch(x, idx[:, 0], MOST, EXPERTS, use_fp8=False), of_tokens),
            (lambda: buffer.dispatch(x, **layout, topk_idx=idx[:2], topk_weights=weights), of_tokens),
            (lambda: buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights[:, :1]), of_choices),
            (lambda: buffer.low_latency_combine(rows, idx.view(9, 2), weights.view(9, 2), handle), "that was disp"),
            (lambda: buffer.low_latency_combine(rows, idx, torch.ones(6, TOP_K + 1), handle), of_choices),
        ]
        for call, text in cases:
            with pytest.raises(ValueError, match=text):
                call()
        sums, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
        assert torch.equal(sums, x * TOP_K), "the refused calls left nothing behind"

    run(body)


def test_what_is_not_there_on_a_host_is_refused(run: Run) -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, _ = tokens_of(buffer.rank)
        layout = {"is_token_in_rank": in_ranks(buffer.rank, 0), "num_tokens_per_expert": torch.zeros(EXPERTS)}
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: buffer.dispatch(x, **layout, num_worst_tokens=64), "num_worst_tokens=64 is not there on a host"),
            (lambda: buffer.dispatch(x), "give is_token_in_rank and num_tokens_per_expert"),
            (lambda: buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_ue8m0=True), "use_ue8m0=True is not"),
            (lambda: buffer.low_latency_dispatch(x, idx, MOST, EXPERTS + 1), "multiple of the 4 ranks, got 13"),
            (lambda: buffer.set_num_sms(3), "must be even, got 3"),
            (lambda: deep_ep.Buffer(None), "either group or comm"),
            (lambda: buffer.get_local_buffer_tensor(torch.uint8), "get_local_buffer_tensor is not there"),
        ]
        if len(x):
            cases += [
                (lambda: buffer.low_latency_dispatch(x, idx, 1, EXPERTS), f"x has {len(x)} tokens"),
                (lambda: buffer.get_dispatch_layout(idx + EXPERTS + 1, EXPERTS), r"topk_idx must be in -1\.\.11"),
            ]
        for call, text in cases:
            with pytest.raises(ValueError, match=text):
                call()
        buffer.destroy()
        buffer.destroy()
        with pytest.raises(ValueError, match="the buffer was destroyed"):
            buffer.low_latency_dispatch(x, idx, MOST, EXPERTS)

    run(body)
