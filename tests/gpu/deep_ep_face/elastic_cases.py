"""Cases of ElasticBuffer of DeepEP's interface on GPUs: what one rank does, and what is right.

Run by deep_ep_rank; a case asserts. Each opens an ElasticBuffer of its own, beside the Buffer of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from deep_ep_tokens import EXPERTS, HIDDEN, MOST, DeepEpTokens, given_by, in_ranks, meet, same, settle

from asyncfabric import FabricConfig
from asyncfabric.integrations.deep_ep import ElasticBuffer, EventHandle
from asyncfabric.moe.fp8 import from_fp8, to_fp8

ALIGNMENT, DEADLINE_S = 4, 20.0


@contextmanager
def elastic_of(buffer: Any, **settings: Any) -> Iterator[Any]:
    """Open one with all ranks of a Buffer; destroyed where the case went well."""
    local: dict[str, Any] = {
        "fabric_config": FabricConfig(rails=("local",)),
        "blocks": 32,
        "num_gpu_timeout_secs": DEADLINE_S,
    }
    made = ElasticBuffer(buffer.group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, **local | settings)
    yield made
    settle()
    meet(buffer)
    made.destroy()


class RightRows:
    """What a rank gets, worked out on the host from the tokens of all."""

    def __init__(self, everyone: list[DeepEpTokens], rank: int) -> None:
        ranks, own = len(everyone), EXPERTS // len(everyone)
        self.own: int = own
        self.places: list[tuple[int, int]] = [
            (source, token)
            for source, given in enumerate(everyone)
            for token in torch.nonzero(in_ranks(given.idx, ranks)[:, rank])[:, 0].tolist()
        ]
        chosen = self.of([given.idx for given in everyone])
        local = chosen - rank * own
        self.idx: torch.Tensor = torch.where((chosen >= 0) & (local >= 0) & (local < own), local, -1)
        self.weights: torch.Tensor = self.of([given.weights for given in everyone]).masked_fill(self.idx < 0, 0.0)
        self.counts: list[int] = [int((self.idx == expert).sum()) for expert in range(own)]
        self.aligned: list[int] = [-(-count // ALIGNMENT) * ALIGNMENT for count in self.counts]
        self.slots: torch.Tensor = torch.full_like(self.idx, -1)
        for expert in range(own):
            at = sum(self.aligned[:expert])
            for row, choice in torch.nonzero(self.idx == expert).tolist():
                self.slots[row, choice] = at
                at += 1

    def of(self, each: list[torch.Tensor]) -> torch.Tensor:
        """Return the rows that come, from those of all ranks."""
        rows = [each[source][token] for source, token in self.places]
        return torch.stack(rows) if rows else each[0][:0]

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return them in their slots, zeros elsewhere."""
        made = torch.zeros(sum(self.aligned), *rows.shape[1:], dtype=rows.dtype)
        for row, choice in torch.nonzero(self.idx >= 0).tolist():
            made[self.slots[row, choice]] = rows[row]
        return made


def summed(rank: int, ranks: int, given: DeepEpTokens, of_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return the sums over ranks, in fp32 from this rank on."""
    there, total = in_ranks(given.idx, ranks), torch.zeros(given.x.shape)
    for far in range(ranks):
        other = (rank + far) % ranks
        total += torch.where(there[:, other, None], of_rank(other).float(), 0.0)
    return total


def by_choices(x: torch.Tensor, idx: torch.Tensor, rank: int, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of rank + 1 times the token for each choice of a rank, made in x's dtype, rounded to another."""
    own, total = EXPERTS // ranks, torch.zeros(x.shape)
    for chosen in idx.unbind(1):
        there = (chosen >= 0) & (chosen // own == rank)
        total += torch.where(there[:, None], (x * (rank + 1)).float(), 0.0)
    return total.to(dtype)


def elastic(buffer: Any, top_k: int, dtype: str, empty: int) -> None:
    """Rows and rows by expert, as many as came and as may come; their sums; and the same layout again."""
    fp8, rank, ranks = dtype == "fp8", buffer.rank, buffer.group_size
    kind = torch.bfloat16 if fp8 else getattr(torch, dtype)
    with elastic_of(buffer) as made:
        for seed, (expanded, exact) in enumerate(product((False, True), (True, False))):
            everyone = [given_by(each, seed, top_k, kind, empty) for each in range(ranks)]
            given, right = everyone[rank], RightRows(everyone, rank)
            cast: list[Any] = [to_fp8(each.x, 128) if fp8 else (each.x, each.x) for each in everyone]
            x: Any = tuple(each.cuda() for each in cast[rank]) if fp8 else given.x.cuda()
            seen = torch.ones(right.own, dtype=torch.int32, device="cuda")
            rows, idx, weights, handle, _ = made.dispatch(
                x,
                given.idx.cuda(),
                given.weights.cuda(),
                cumulative_local_expert_recv_stats=seen,
                num_experts=EXPERTS,
                expert_alignment=ALIGNMENT,
                do_cpu_sync=exact,
                do_expand=expanded,
                use_tma_aligned_col_major_sf=expanded,
            )
            assert seen.tolist() == [count + 1 for count in right.counts]
            check_elastic_handle(handle, right, ranks, top_k, exact)
            data: Any
            scales: Any
            data, scales = rows if fp8 else (rows, None)
            size = sum(right.aligned) if expanded else len(right.places)
            plain = right.of([each[0].view(torch.uint8) if fp8 else each[0] for each in cast])
            bits = data.view(torch.uint8) if fp8 else data
            assert same(bits[:size], right.by_expert(plain) if expanded else plain) and not bits[size:].any()
            if scales is not None:
                plain = right.of([each[1] for each in cast])
                assert same(scales[:size], right.by_expert(plain) if expanded else plain)
                assert not expanded or scales.stride()[0] == 1
            if expanded:
                expected = torch.zeros(size)
                expected[right.slots[right.idx >= 0]] = right.weights[right.idx >= 0]
                assert idx is None and same(weights[:size], expected)
            else:
                assert torch.equal(idx[:size].cpu(), right.idx) and bool((idx[size:] == -1).all())
                assert same(weights[:size], right.weights)
            values = from_fp8(data[:size], scales[:size].contiguous(), kind) if fp8 else data[:size]
            outputs = torch.full(data.shape, float("nan"), dtype=kind, device="cuda")
            outputs[:size] = values * (rank + 1)
            sums, back, _ = made.combine(outputs, handle, topk_weights=weights)
            own = from_fp8(cast[rank][0], cast[rank][1], kind) if fp8 else given.x
            total = summed(
                rank,
                ranks,
                given,
                (lambda other: by_choices(own, given.idx, other, ranks, kind))  # noqa: B023
                if expanded
                else (lambda other: own * (other + 1)),  # noqa: B023
            )
            assert same(sums, total.to(kind))
            assert same(back, given.weights.masked_fill(given.idx < 0, 0.0))
            again, idx, weights, same_one, _ = made.dispatch(given.x.cuda(), handle=handle)
            assert same_one is handle and weights is None
            came = len(right.places)
            assert torch.equal(idx[:came].cpu(), right.idx)
            assert same(again[:came], right.of([each.x for each in everyone]))
            _, _, weights, _, _ = made.dispatch(x, topk_weights=2 * given.weights.cuda(), handle=handle)
            assert same(weights[:came], 2 * right.weights)


def check_elastic_handle(handle: Any, right: RightRows, ranks: int, top_k: int, exact: bool) -> None:
    ends = [sum(source <= rank for source, _ in right.places) for rank in range(ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == right.counts
    assert handle.num_recv_tokens_per_expert_list == (right.aligned if exact else [])
    begins = [sum(right.aligned[:expert]) for expert in range(right.own)]
    last = right.counts if handle.do_expand else right.aligned
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [a + b for a, b in zip(begins, last, strict=True)]
    came, worst = len(right.places), ranks * MOST
    assert handle.num_recv_tokens == len(handle.recv_src_metadata) == (came if exact else worst)
    metadata = handle.recv_src_metadata.cpu().long()
    assert metadata[:came, 0].tolist() == [source * MOST + token for source, token in right.places]
    assert torch.equal(metadata[:came, 2:], right.slots if handle.do_expand else torch.full_like(right.slots, -1))
    assert bool((metadata[came:] == -1).all())
    expanded = -(-(worst * min(top_k, right.own) + (ALIGNMENT - 1) * right.own) // ALIGNMENT) * ALIGNMENT
    assert handle.num_expanded_tokens == (sum(right.aligned) if exact else expanded)


def elastic_once(buffer: Any) -> None:
    """Outputs by expert are rounded once, where only one reduction is allowed."""
    rank, ranks = buffer.rank, buffer.group_size
    with elastic_of(buffer, allow_multiple_reduction=False) as made:
        given = given_by(rank, 0, 10)
        rows, _, _, handle, _ = made.dispatch(given.x.cuda(), given.idx.cuda(), num_experts=EXPERTS, do_expand=True)
        sums, _, _ = made.combine(rows * (rank + 1), handle)
        total = summed(rank, ranks, given, lambda other: by_choices(given.x, given.idx, other, ranks, torch.float32))
        assert same(sums, total.bfloat16())
        sums, _, _ = made.combine(rows * (rank + 1), handle)  # the step is fp32 by now
        assert same(sums, total.bfloat16())


def elastic_streams(buffer: Any) -> None:
    """Work waits for both events that it is given, not for the current stream, which waits for nothing."""
    rank, ranks = buffer.rank, buffer.group_size
    with elastic_of(buffer) as made:
        given = given_by(rank, 5, 4)
        x, idx, weights = (each.cuda() for each in given)
        assert made.get_comm_stream() != torch.cuda.current_stream()
        rows, _, _, handle, _ = made.dispatch(x, idx, weights, num_experts=EXPERTS)  # what is used first is opened
        made.combine(rows, handle)
        side, late, later = torch.cuda.Stream(), torch.zeros_like(x), torch.zeros_like(idx)  # type: ignore[no-untyped-call]
        settle()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            late.copy_(x)
            ready = made.capture()
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            later.copy_(idx)
            before_epilogue = made.capture()
        order: dict[str, Any] = {"async_with_compute_stream": True, "allocate_on_comm_stream": True}
        rows, _, _, handle, event = made.dispatch(
            late,
            later,
            weights,
            num_experts=EXPERTS,
            previous_event=ready,
            previous_event_before_epilogue=before_epilogue,
            **order,
        )
        assert isinstance(event.event, EventHandle)
        with event(release_handle=True):
            pass
        assert event.event is None
        sums, _, event = made.combine(rows * (rank + 1), handle, previous_event=made.capture(), **order)
        with torch.cuda.stream(side):
            event.current_stream_wait()
            copy = sums.clone()
        side.synchronize()
        assert same(copy, summed(rank, ranks, given, lambda other: given.x * (other + 1)).bfloat16())
        with pytest.raises(ValueError, match="previous_event needs allocate_on_comm_stream"):
            made.combine(rows, handle, previous_event=ready)
        made.barrier()


def elastic_graph(buffer: Any, expanded: bool, rounds: int) -> None:
    """A whole step in a graph, replayed with other tokens each time; wrong elements are counted on the GPU."""
    top_k, sets, rank, ranks = 4, 6, buffer.rank, buffer.group_size
    x, idx = torch.zeros(MOST, HIDDEN).bfloat16().cuda(), torch.full((MOST, top_k), -1, dtype=torch.int64).cuda()
    weights, fresh, right = torch.zeros(MOST, top_k).cuda(), [], []
    for seed in range(sets):
        given = given_by(rank, seed, top_k)
        total = summed(
            rank,
            ranks,
            given,
            (lambda other: by_choices(given.x, given.idx, other, ranks, torch.bfloat16))  # noqa: B023
            if expanded
            else (lambda other: given.x * (other + 1)),  # noqa: B023
        )
        full = [torch.zeros_like(x), torch.full_like(idx, -1), torch.zeros_like(weights), torch.zeros_like(x)]
        for target, source in zip(full, (*given, total.bfloat16()), strict=True):
            target[: len(source)] = source.cuda()
        fresh.append(full[:3])
        right.append(full[3])
    with elastic_of(buffer) as made:

        def step() -> Any:
            rows, _, _, handle, _ = made.dispatch(
                x, idx, weights, num_experts=EXPERTS, expert_alignment=4, do_cpu_sync=False, do_expand=expanded
            )
            return made.combine(rows * (rank + 1), handle)[0]

        step()
        captured, out = torch.cuda.CUDAGraph(), x
        for turn in range(ranks):  # a capture begins by waiting for the whole GPU
            settle()
            meet(buffer)
            if turn == rank:
                with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                    out = step()
        meet(buffer)
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        for number in range(rounds):
            for target, source in zip((x, idx, weights), fresh[number % sets], strict=True):
                target.copy_(source)
            captured.replay()
            wrong += (out != right[number % sets]).sum()
        assert int(wrong) == 0, f"{int(wrong)} elements of {rounds} replays"
        assert same(step(), right[(rounds - 1) % sets].cpu())  # outside of the graph it goes on
