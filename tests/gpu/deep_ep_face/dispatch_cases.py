"""Cases of `dispatch` and `combine` of DeepEP's interface on GPUs: what one rank does, and what is right.

Run by deep_ep_rank; a case asserts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_ep_tokens import EXPERTS, HIDDEN, MOST, MOST_TOKENS, DeepEpTokens, given_by, in_ranks, same, settle

from asyncfabric.integrations.deep_ep import Buffer, EventHandle, EventOverlap
from asyncfabric.moe.fp8 import from_fp8, to_fp8


def sent(buffer: Any, given: DeepEpTokens, fp8: bool, **more: Any) -> Any:
    """Ask for the layout and dispatch, as engines do."""
    x, idx, weights = (each.cuda() for each in given)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    assert per_node is None
    assert torch.equal(in_rank.cpu(), in_ranks(given.idx, buffer.group_size))
    assert per_rank.tolist() == in_rank.sum(0).tolist()
    assert per_expert.tolist() == [int((given.idx == each).sum()) for each in range(EXPERTS)]
    data: Any = tuple(each.cuda() for each in to_fp8(given.x, 128)) if fp8 else x
    return buffer.dispatch(
        data,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
        expert_alignment=4,
        **more,
    )


def ring_sum(buffer: Any, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """Return what each token gets where rank r gives its rows times r + 1."""
    there, total = in_ranks(idx, buffer.group_size), torch.zeros(x.shape)
    for far in range(buffer.group_size):
        other = (buffer.rank + far) % buffer.group_size
        total += torch.where(there[:, other, None], (x * (other + 1)).float(), 0.0)
    return total.to(x.dtype)


def check_rows(buffer: Any, everyone: list[DeepEpTokens], received: Any, fp8: bool) -> None:
    rows, idx, weights, counts, handle, _ = received
    own, first = EXPERTS // buffer.group_size, EXPERTS // buffer.group_size * buffer.rank
    wanted = [
        (source, token)
        for source, given in enumerate(everyone)
        for token in torch.nonzero(in_ranks(given.idx, buffer.group_size)[:, buffer.rank])[:, 0].tolist()
    ]
    data: Any
    scales: Any
    data, scales = rows if fp8 else (rows, None)
    assert len(data) == len(wanted)
    if wanted:
        cast = [to_fp8(given.x, 128)[0] if fp8 else given.x for given in everyone]
        everyone_scales = [to_fp8(given.x, 128)[1] if fp8 else given.x for given in everyone]
        right = torch.stack([cast[source].view(torch.uint8)[token] for source, token in wanted])
        assert torch.equal(data.cpu().view(torch.uint8), right)
        if fp8:
            assert same(scales, torch.stack([everyone_scales[source][token] for source, token in wanted]))
        chosen = torch.stack([everyone[source].idx[token] for source, token in wanted]) - first
        chosen = torch.where((chosen >= 0) & (chosen < own), chosen, -1)
        given_weights = torch.stack([everyone[source].weights[token] for source, token in wanted])
        assert torch.equal(idx.cpu(), chosen)
        assert same(weights, torch.where(chosen >= 0, given_weights, 0.0))
    every = torch.cat([given.idx.reshape(-1) for given in everyone])
    assert counts == [-(-int((every == first + each).sum()) // 4) * 4 for each in range(own)]
    ends = [sum(source <= rank for source, _ in wanted) for rank in range(buffer.group_size)]
    assert handle[0][:, buffer.rank].tolist() == ends


def normal(buffer: Any, top_k: int, dtype: str, empty: int) -> None:
    """Rows, experts, weights and counts; sums with biases, and weights; the layout again; combined twice."""
    fp8 = dtype == "fp8"
    kind = torch.bfloat16 if fp8 else getattr(torch, dtype)
    for seed in range(3):
        everyone = [given_by(rank, seed, top_k, kind, empty) for rank in range(buffer.group_size)]
        given = everyone[buffer.rank]
        received = sent(buffer, given, fp8)
        check_rows(buffer, everyone, received, fp8)
        rows, _, weights, _, handle, _ = received
        outputs = from_fp8(rows[0], rows[1], torch.bfloat16) if fp8 else rows
        x = from_fp8(*to_fp8(given.x, 128), torch.bfloat16) if fp8 else given.x
        bias = torch.ones_like(x).cuda()
        sums, summed, _ = buffer.combine(outputs * (buffer.rank + 1), handle, topk_weights=weights, bias=(bias, bias))
        plain = ring_sum(buffer, x, given.idx)
        assert same(sums, (plain.float() + 1 + 1).to(kind))
        assert same(summed, given.weights.masked_fill(given.idx < 0, 0.0))
        grads, none, no_weights, no_counts, no_handle, _ = buffer.dispatch(given.x.cuda(), handle=handle)
        assert none is no_weights is no_counts is no_handle is None and len(grads) == len(outputs)
        for factor in (1, 2):
            sums, _, _ = buffer.combine(grads * (buffer.rank + 1) * factor, handle)
            assert same(sums, ring_sum(buffer, given.x * factor, given.idx))


def left_alone(buffer: Any) -> None:
    """More dispatches than may be in flight, combined in another order, one never."""
    everyone = [[given_by(rank, seed, 3) for rank in range(buffer.group_size)] for seed in range(4)]
    received = [sent(buffer, each[buffer.rank], False) for each in everyone]
    for seed in (3, 0, 1):
        given = everyone[seed][buffer.rank]
        sums, _, _ = buffer.combine(received[seed][0] * (buffer.rank + 1), received[seed][4])
        assert same(sums, ring_sum(buffer, given.x, given.idx))


def full(buffer: Any) -> None:
    """As many tokens as there may be go to all ranks, which fills the rows to the last; then again by the handle."""
    ranks, own = buffer.group_size, EXPERTS // buffer.group_size
    everyone = []
    for rank in range(ranks):
        draws = torch.Generator().manual_seed(rank)
        idx = torch.randint(0, own, (MOST_TOKENS, ranks), generator=draws) + own * torch.arange(ranks)
        x = torch.randn(MOST_TOKENS, HIDDEN, generator=draws).bfloat16()
        everyone.append(DeepEpTokens(x, idx, torch.rand(idx.shape, generator=draws)))
    given = everyone[buffer.rank]
    received = sent(buffer, given, False)
    check_rows(buffer, everyone, received, False)
    rows, handle = received[0], received[4]
    assert len(rows) == len(handle.step.handle.rows) == ranks * MOST_TOKENS, "rows are left over"
    handle.is_token_in_rank.zero_()  # the caller's tensor: routes of the handle are those of the call
    again, *_ = buffer.dispatch(given.x.cuda(), handle=handle)
    assert same(again, rows.cpu())
    sums, _, _ = buffer.combine(again * (buffer.rank + 1), handle)
    assert same(sums, ring_sum(buffer, given.x, given.idx))


def worst(buffer: Any) -> None:
    """The host does not wait: rows behind the last have no experts."""
    most = buffer.group_size * MOST
    for seed in range(3):
        everyone = [given_by(rank, seed, 4) for rank in range(buffer.group_size)]
        given = everyone[buffer.rank]
        rows, idx, weights, counts, handle, _ = sent(buffer, given, False, num_worst_tokens=most)
        assert counts == [] and len(rows) == len(idx) == len(weights) == most
        came = sum(int(in_ranks(each.idx, buffer.group_size)[:, buffer.rank].sum()) for each in everyone)
        assert bool((idx[came:] == -1).all()) and not weights[came:].any() and bool((idx[:came] >= 0).any(1).all())
        sums, _, _ = buffer.combine(rows * (buffer.rank + 1), handle)
        assert same(sums, ring_sum(buffer, given.x, given.idx))


def streams(buffer: Any) -> None:
    """Work waits for the event that it is given, not for the current stream; the current stream waits for nothing."""
    device = torch.cuda.current_device()
    comm = buffer.get_comm_stream()
    assert comm.device_index == device and comm != torch.cuda.current_stream()
    given = given_by(buffer.rank, 5, 4)
    x, idx, weights = (each.cuda() for each in given)
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS, async_finish=True)
    event.current_stream_wait()
    layout: dict[str, Any] = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank}
    layout |= {"num_tokens_per_expert": per_expert, "topk_idx": idx, "topk_weights": weights}
    side, late = torch.cuda.Stream(), torch.zeros_like(x)  # type: ignore[no-untyped-call]
    settle()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        late.copy_(x)
        ready = Buffer.capture()
    more = {"previous_event": ready, "async_finish": True, "allocate_on_comm_stream": True}
    rows, _, _, _, handle, event = buffer.dispatch(late, **layout, **more)
    assert isinstance(event, EventOverlap) and event.event is not None
    with event:
        pass
    sums, _, event = buffer.combine(
        rows * (buffer.rank + 1), handle, async_finish=True, previous_event=buffer.capture()
    )
    with torch.cuda.stream(side):
        event.current_stream_wait()
        copy = sums.clone()
        EventOverlap(EventHandle()).current_stream_wait()
    side.synchronize()
    assert same(copy, ring_sum(buffer, given.x, given.idx))
    with pytest.raises(ValueError, match="needs a previous_event"):
        buffer.combine(rows, handle, allocate_on_comm_stream=True)
    with pytest.raises(ValueError, match=f"brought {len(rows)}"):
        buffer.combine(rows[:-1], handle)
    with pytest.raises(ValueError, match="get_local_buffer_tensor is not there"):
        buffer.get_local_buffer_tensor(torch.uint8)
