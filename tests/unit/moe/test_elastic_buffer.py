"""DeepEP's second interface, ElasticBuffer, on host tensors: ranks are threads, and plain torch is what is right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="DeepEP's tensors are torch's")
pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

from deep_ep_ranks import PATIENCE_S, Run, ranks_of  # noqa: E402
from elastic_reference import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    MOST,
    OWN,
    RANKS,
    ROOM,
    TOP_K,
    Right,
    as_bf16,
    check_handle,
    fp8_of,
    of_experts,
    ring_sum,
    run_experts,
    same,
    tokens_of,
)

from asyncfabric.integrations import deep_ep  # noqa: E402
from asyncfabric.moe.fp8 import from_fp8  # noqa: E402

pytestmark = pytest.mark.slow
SOON_S = 0.3
"""A time that is meant to pass."""


def opened(comm: Any, **settings: Any) -> deep_ep.ElasticBuffer:
    sizes = {"num_max_tokens_per_rank": ROOM, "hidden": HIDDEN, "num_topk": TOP_K}
    return deep_ep.ElasticBuffer(None, comm=comm, num_cpu_timeout_secs=PATIENCE_S, **sizes | settings)


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a function on all ranks at once, with buffers that are opened with the settings of the first call."""
    with ranks_of(RANKS, opened) as run:
        yield run


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "rows"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.usefixtures("default_dtype")
def test_rows_of_ranks_and_sums_over_them(run: Run, fp8: bool, weighted: bool) -> None:
    def body(buffer: deep_ep.ElasticBuffer) -> None:
        rank, seen, expected = buffer.rank_idx, torch.zeros(OWN, dtype=torch.int32), torch.zeros(OWN)
        for seed in range(3):
            right, (x, topk_idx, topk_weights) = Right(rank, seed, 4), tokens_of(rank, seed)
            rows, idx, weights, handle, event = buffer.dispatch(
                fp8_of(x) if fp8 else x,
                topk_idx=topk_idx,
                topk_weights=topk_weights if weighted else None,
                cumulative_local_expert_recv_stats=seen,
                num_experts=EXPERTS,
                num_max_tokens_per_rank=MOST,
                expert_alignment=4,
            )
            assert event.event is None
            data = rows[0] if fp8 else rows
            assert same(data, right.of(0, lambda given: fp8_of(given)[0] if fp8 else given))
            if fp8:
                assert same(rows[1], right.of(0, lambda given: fp8_of(given)[1]))
            assert torch.equal(idx, right.idx)
            assert weights is None if not weighted else torch.equal(weights, right.weights)
            check_handle(handle, right, 4, expanded=False)
            assert handle.num_recv_tokens_per_expert_list == right.aligned
            assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (len(right.places), sum(right.aligned))
            expected += torch.tensor(right.counts)
            assert seen.tolist() == expected.tolist()
            assert torch.equal(handle.topk_idx, topk_idx)
            assert not len(x) or handle.topk_idx.data_ptr() != topk_idx.data_ptr()
            outputs = (from_fp8(*rows, torch.bfloat16) if fp8 else rows) * (rank + 1)
            bias = torch.ones(x.shape, dtype=torch.bfloat16)
            of_others = None if weights is None else weights.masked_fill(idx < 0, 1000.0)
            sums, summed, event = buffer.combine(outputs, handle, topk_weights=of_others, bias=(bias, bias))
            event.current_stream_wait()
            total = ring_sum(rank, seed, lambda other: as_bf16(x, fp8) * (other + 1))  # noqa: B023
            assert same(sums, (total.bfloat16().float() + 2).bfloat16())
            assert summed is None if not weighted else same(summed, topk_weights.masked_fill(topk_idx < 0, 0.0))

    run(body)


@pytest.mark.parametrize("once", [False, True], ids=["two roundings", "one rounding"])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.usefixtures("default_dtype")
def test_rows_by_expert_and_their_sums(run: Run, fp8: bool, alignment: int, once: bool) -> None:
    def body(buffer: deep_ep.ElasticBuffer) -> int:
        rank, differ = buffer.rank_idx, 0
        for seed in range(2):
            right, (x, topk_idx, topk_weights) = Right(rank, seed, alignment), tokens_of(rank, seed)
            rows, idx, weights, handle, _ = buffer.dispatch(
                fp8_of(x) if fp8 else x,
                topk_idx,
                topk_weights,
                num_experts=EXPERTS,
                num_max_tokens_per_rank=MOST,
                expert_alignment=alignment,
                do_expand=True,
                do_zero_padding=True,
                use_tma_aligned_col_major_sf=True,
            )
            assert idx is None
            data = rows[0] if fp8 else rows
            assert same(data, right.by_expert(right.of(0, lambda given: fp8_of(given)[0] if fp8 else given)))
            if fp8:
                assert same(rows[1], right.by_expert(right.of(0, lambda given: fp8_of(given)[1])))
                assert rows[1].stride() == (1, -(-len(data) // 4) * 4) or len(data) < 2
            expected = torch.zeros(sum(right.aligned), dtype=torch.float32)
            expected[right.slots[right.idx >= 0]] = right.weights[right.idx >= 0]
            assert same(weights, expected)
            check_handle(handle, right, alignment, expanded=True)
            assert handle.num_recv_tokens_per_expert_list == right.aligned
            outputs = run_experts(rank, right, from_fp8(*rows, torch.bfloat16) if fp8 else rows)
            sums, summed, _ = buffer.combine(outputs, handle, topk_weights=weights)
            own = as_bf16(x, fp8)
            totals = [
                ring_sum(rank, seed, lambda other: of_experts(own, topk_idx, other, dtype))  # noqa: B023
                for dtype in (torch.bfloat16, torch.float32)
            ]
            assert same(sums, totals[once].bfloat16())
            assert same(summed, topk_weights.masked_fill(topk_idx < 0, 0.0))
            differ += int((totals[0].bfloat16() != totals[1].bfloat16()).sum())
        return differ

    assert sum(run(body, allow_multiple_reduction=not once)) > 0, "the roundings could not be distinguished"


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("expanded", [False, True], ids=["rows", "by expert"])
def test_shapes_of_the_worst_case(run: Run, expanded: bool, fp8: bool) -> None:
    def body(buffer: deep_ep.ElasticBuffer) -> None:
        rank, alignment = buffer.rank_idx, 4
        right, (x, topk_idx, topk_weights) = Right(rank, 0, alignment), tokens_of(rank)
        for _ in range(2):
            rows, idx, weights, handle, _ = buffer.dispatch(
                fp8_of(x) if fp8 else x,
                topk_idx,
                topk_weights,
                num_experts=EXPERTS,
                num_max_tokens_per_rank=MOST,
                expert_alignment=alignment,
                do_cpu_sync=False,
                do_expand=expanded,
            )
            most = RANKS * MOST
            assert handle.num_recv_tokens_per_expert_list == [] and handle.num_recv_tokens == most
            assert handle.num_expanded_tokens == -(-(most * min(TOP_K, OWN) + 3 * OWN) // 4) * 4
            check_handle(handle, right, alignment, expanded)
            assert (handle.recv_src_metadata[len(right.places) :] == -1).all()
            data = rows[0] if fp8 else rows
            came, plain = len(right.places), right.of(0, lambda given: fp8_of(given)[0] if fp8 else given)
            filled = sum(right.aligned) if expanded else came
            assert len(data) == (handle.num_expanded_tokens if expanded else most)
            assert same(data[:filled], right.by_expert(plain) if expanded else plain)
            assert not data[filled:].view(torch.uint8).any()
            values = from_fp8(*rows, torch.bfloat16) if fp8 else rows
            outputs = torch.full(data.shape, float("nan"), dtype=torch.bfloat16)
            if expanded:
                assert idx is None and weights.shape == (len(data),)
                outputs[:filled] = run_experts(rank, right, values[:filled])
            else:
                assert torch.equal(idx[:came], right.idx) and (idx[came:] == -1).all()
                assert torch.equal(weights[:came], right.weights) and not weights[came:].any()
                outputs[:came] = values[:came] * (rank + 1)
            sums, summed, _ = buffer.combine(outputs, handle, topk_weights=weights)
            own = as_bf16(x, fp8)
            of_rank = (
                (lambda other: of_experts(own, topk_idx, other, torch.bfloat16))  # noqa: B023
                if expanded
                else (lambda other: own * (other + 1))  # noqa: B023
            )
            assert same(sums, ring_sum(rank, 0, of_rank).bfloat16())
            assert same(summed, topk_weights.masked_fill(topk_idx < 0, 0.0))

    run(body)


@pytest.mark.parametrize("sync", [True, False], ids=["exact", "worst"])
@pytest.mark.usefixtures("default_dtype")
def test_a_layout_is_used_again(run: Run, sync: bool) -> None:
    def body(buffer: deep_ep.ElasticBuffer) -> None:
        rank = buffer.rank_idx
        rights = [Right(rank, seed, 4) for seed in range(3)]
        more = {"num_experts": EXPERTS, "expert_alignment": 4, "do_cpu_sync": sync}
        kept = [buffer.dispatch(*tokens_of(rank, seed), **more, do_expand=seed == 1) for seed in range(3)]
        for seed in (2, 0, 1, 0):
            right, handle = rights[seed], kept[seed][3]
            x, topk_idx, topk_weights = tokens_of(rank, seed)
            rows, idx, weights, again, _ = buffer.dispatch(x * 2, handle=handle, do_expand=seed == 1)
            assert again is handle and weights is None and rows.shape == kept[seed][0].shape
            came = len(right.places)
            if seed == 1:
                filled = sum(right.aligned)
                assert idx is None and same(rows[:filled], right.by_expert(right.of(0) * 2))
                plain, idx, weights, _, _ = buffer.dispatch(x, topk_weights=-topk_weights, handle=handle)
                assert torch.equal(idx[:came], right.idx) and torch.equal(weights[:came], -right.weights)
                assert same(plain[:came], right.of(0))
                rows, _, weights, _, _ = buffer.dispatch(x, topk_weights=topk_weights, handle=handle, do_expand=True)
                outputs = torch.zeros(rows.shape, dtype=torch.bfloat16)
                outputs[:filled] = run_experts(rank, right, rows[:filled])
                sums, summed, _ = buffer.combine(outputs, handle, topk_weights=weights)
                total = ring_sum(rank, seed, lambda other: of_experts(x, topk_idx, other, torch.bfloat16))  # noqa: B023
                assert same(sums, total.bfloat16())
                assert same(summed, topk_weights.masked_fill(topk_idx < 0, 0.0))
            else:
                assert torch.equal(idx[:came], right.idx) and same(rows[:came], right.of(0) * 2)
                idx.fill_(7)  # what a caller does to its experts is not seen by the next
                for factor in (1, 3):
                    sums, _, _ = buffer.combine(rows * factor, handle)
                    assert same(sums, ring_sum(rank, seed, lambda other: x * 2 * factor).bfloat16())  # noqa: B023
                also = {"topk_weights": topk_weights} if seed == 0 else {}
                wide, _, _, _, _ = buffer.dispatch(x.float() / 3, handle=handle, **also)
                assert wide.dtype == torch.float32
                sums, _, _ = buffer.combine(wide, handle)
                assert same(sums, ring_sum(rank, seed, lambda other: x.float() / 3))  # noqa: B023

    run(body)


def test_scales_of_four_exponents_travel_as_they_are(run: Run) -> None:
    def body(buffer: deep_ep.ElasticBuffer) -> None:
        rank = buffer.rank_idx
        right, (x, topk_idx, _) = Right(rank), tokens_of(rank)

        def packed(given: Any) -> Any:
            draws = torch.Generator().manual_seed(int(given.float().abs().sum()))
            made = torch.randint(-(2**31), 2**31 - 1, (len(given), HIDDEN // 128), generator=draws)
            made[:, 0] |= 0x7F800000  # as a float: no number
            return made.to(torch.int32)

        by_columns = packed(x).t().contiguous().t()
        (rows, scales), _, _, handle, _ = buffer.dispatch((fp8_of(x)[0], by_columns), topk_idx, num_experts=EXPERTS)
        assert scales.dtype == torch.int32 and torch.equal(scales, right.of(0, packed))
        assert same(rows, right.of(0, lambda given: fp8_of(given)[0]))
        (_, scales), _, _, _, _ = buffer.dispatch((fp8_of(x)[0], by_columns), handle=handle)
        assert torch.equal(scales, right.of(0, packed))

    run(body)


def test_settings_and_what_is_known_of_ranks(run: Run) -> None:
    left = threading.Event()

    def body(buffer: deep_ep.ElasticBuffer) -> None:
        rank = buffer.rank_idx
        assert (buffer.num_ranks, buffer.num_max_tokens_per_rank, buffer.allow_hybrid_mode) == (RANKS, ROOM, True)
        assert buffer.get_logical_domain_size() == (1, RANKS) == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
        assert buffer.get_physical_domain_size() == (2, 2) == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
        sms = buffer.get_theoretical_num_sms(num_experts=EXPERTS, num_topk=TOP_K)
        assert sms > 0 == sms % 2 and buffer.get_theoretical_num_qps(sms) == 9
        x, topk_idx, _ = tokens_of(rank)
        event = buffer.capture()
        assert isinstance(event, deep_ep.EventHandle)
        streams = {"async_with_compute_stream": True, "allocate_on_comm_stream": True, "previous_event": event}
        rows, _, _, handle, after = buffer.dispatch(
            x, topk_idx, num_experts=EXPERTS, num_sms=6, num_qps=3, do_handle_copy=False, **streams
        )
        assert handle.num_sms == 6 and handle.topk_idx.data_ptr() == topk_idx.data_ptr()
        with after(release_handle=True):
            pass
        sums, _, _ = buffer.combine(rows, handle, previous_event_before_epilogue=event, **streams)
        assert same(sums, ring_sum(rank, 0, lambda other: x).bfloat16())
        if rank == 3:
            assert not left.wait(SOON_S), "the barrier waits for all"
        buffer.barrier()
        left.set()

    run(body, hosts=[0, 0, 1, 1], num_allocated_qps=9)


def test_size_hints_grow_with_the_settings() -> None:
    class Group:
        def __init__(self, ranks: int) -> None:
            self.ranks = ranks

        def size(self) -> int:
            return self.ranks

    def hint(ranks: int, *sizes: int, **more: Any) -> int:
        found: int = deep_ep.ElasticBuffer.get_buffer_size_hint(Group(ranks), *sizes, **more)
        return found

    plain = hint(16, 4096, 7168, 8)
    assert plain % (2 << 20) == 0 and plain >= 16 * 4096 * 7168 * 2
    assert hint(16, 8192, 7168, 8) > plain > hint(16, 4096, 7168, 8, use_fp8_dispatch=True) > hint(4, 4096, 7168, 8)
    assert hint(4, 4096, 7168, 8, allow_multiple_reduction=False) > hint(4, 4096, 7168, 8)
    with pytest.raises(ValueError, match="must be 1 or more, got 0 and 7168"):
        hint(16, 0, 7168)


def test_what_does_not_fit_or_is_not_there_is_refused_before_anything_is_sent(run: Run) -> None:
    def body(buffer: deep_ep.ElasticBuffer) -> None:
        x, idx, weights = torch.ones(6, HIDDEN).bfloat16(), torch.arange(TOP_K).repeat(6, 1), torch.ones(6, TOP_K)
        given = {"topk_idx": idx, "num_experts": EXPERTS}
        rows, _, _, handle, _ = buffer.dispatch(x, **given, topk_weights=weights)
        by_expert, _, _, expanding, _ = buffer.dispatch(x, **given, do_expand=True)
        event = buffer.capture()
        few, more = torch.zeros(OWN + 1, dtype=torch.int32), torch.zeros(len(rows) + 1, HIDDEN).bfloat16()
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: buffer.dispatch(x, topk_idx=idx), "give topk_idx and num_experts, or a handle"),
            (lambda: buffer.dispatch(x, topk_idx=idx, num_experts=13), "multiple of the 4 ranks, got 13"),
            (lambda: buffer.dispatch(x, topk_idx=idx + 8, num_experts=EXPERTS), r"topk_idx must be in -1\.\.11"),
            (lambda: buffer.dispatch(x, topk_idx=idx[:2], num_experts=EXPERTS), r"the shape \[6, top_k\]"),
            (lambda: buffer.dispatch(x, **given, topk_weights=weights[:2]), "topk_weights must have the shape of"),
            (lambda: buffer.dispatch(x, **given, num_max_tokens_per_rank=5), "x has 6 tokens, num_max_tokens_per_"),
            (lambda: buffer.dispatch(x, **given, num_max_tokens_per_rank=33), "must be at most 32, got 33"),
            (lambda: buffer.dispatch(x, **given, do_zero_padding=True), "do_zero_padding=True needs do_expand"),
            (lambda: buffer.dispatch(x, **given, previous_event=event), "previous_event needs allocate_on_comm_stream"),
            (lambda: buffer.dispatch(x, **given, cumulative_local_expert_recv_stats=few), r"must be torch.int32 \[3\]"),
            (lambda: buffer.dispatch(x, topk_idx=idx, handle=handle), "takes no topk_idx"),
            (lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True), "do_cpu_sync=True does not go with a handle"),
            (lambda: buffer.dispatch(x, handle=handle, do_expand=True), "do_expand=True needs the handle of"),
            (lambda: buffer.dispatch(x, handle=handle, num_experts=24), "num_experts must be 12, that of the handle"),
            (lambda: buffer.dispatch(x, handle=handle, expert_alignment=4), "expert_alignment must be 1, that of"),
            (lambda: buffer.dispatch(x, handle=handle, num_max_tokens_per_rank=8), "must be 32, that of the handle"),
            (lambda: buffer.dispatch(x[:5], handle=handle), r"topk_idx must have the shape \[5, top_k\], got \[6, 5\]"),
            (lambda: buffer.combine(more, handle), f"x has {len(more)} rows, the dispatch of this handle returned"),
            (lambda: buffer.combine(torch.cat([by_expert, x]), expanding), f"returned {len(by_expert)}"),
            (lambda: buffer.combine(rows, handle, topk_weights=more[:, 0]), "topk_weights must have the shape"),
            (lambda: buffer.engram_fetch(idx), "engram_fetch is not there: an exchange of experts has"),
            (lambda: buffer.pp_send(x, 1), "pp_send is not there"),
            (lambda: buffer.all_gather(x), "all_gather is not there: .* torch.distributed"),
            (lambda: deep_ep.ElasticBuffer.get_pp_buffer_size_hint(1, 1), "get_pp_buffer_size_hint is not there"),
            (lambda: deep_ep.ElasticBuffer(None, 1, 2 << 20), "num_cpu_bytes=2097152 is not there"),
            (lambda: deep_ep.ElasticBuffer(None, num_max_tokens_per_rank=8), "give num_bytes, or num_max_tokens"),
            (lambda: deep_ep.ElasticBuffer(None, num_bytes=1), "either group or comm"),
        ]
        for call, text in cases:
            with pytest.raises(ValueError, match=text):
                call()
        with pytest.raises(TypeError, match=r"scales must be float32, .* got torch.uint8"):
            buffer.dispatch((fp8_of(x)[0], torch.ones(6, 8, dtype=torch.uint8)), **given)
        sums, _, _ = buffer.combine(rows, handle)
        assert torch.equal(sums, x * 2), "the refused calls left nothing behind"
        sums, _, _ = buffer.combine(by_expert, expanding)
        assert torch.equal(sums, x * TOP_K)

    run(body)
