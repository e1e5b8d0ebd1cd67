"""Cases of the low-latency calls of DeepEP's interface on GPUs: what one rank does, and what is right.

Run by deep_ep_rank; a case asserts.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from deep_ep_tokens import EXPERTS, HIDDEN, MOST, DeepEpTokens, given_by, meet, same, settle
from nvlink_fixture import Tokens, expected, outputs_of

from asyncfabric.integrations.deep_ep import topk_idx_t
from asyncfabric.moe import MissingRankError, MoeConfig
from asyncfabric.moe.fp8 import to_fp8

LATE_S = 0.3


def shape_of(
    buffer: Any, top_k: int, dtype: torch.dtype, fp8: bool, *, hidden: int = HIDDEN, most: int = MOST
) -> MoeConfig:
    """Return the shape by which what is right is worked out."""
    return MoeConfig(
        num_experts=EXPERTS,
        top_k=top_k,
        hidden=hidden,
        max_tokens=most,
        ranks=buffer.group_size,
        in_dtype="float8_e4m3fn" if fp8 else str(dtype).removeprefix("torch."),
        scale_block=128 if fp8 else 0,
        out_dtype=str(dtype).removeprefix("torch."),
    )


def cast_of(given: DeepEpTokens, fp8: bool, rounded: bool, block: int = 128) -> Tokens:
    x, scales = to_fp8(given.x, block, power_of_two=rounded) if fp8 else (given.x, None)
    return Tokens(x, given.idx, given.weights, scales)


def run_slots(config: MoeConfig, buffer: Any, rows: Any, fp8: bool) -> torch.Tensor:
    """What the experts of this rank make of their slots."""
    data, scales = rows if fp8 else (rows, None)
    own, slots, hidden = data.shape
    numbers = (torch.arange(own, device="cuda") + buffer.rank * own).repeat_interleave(slots)
    flat = None if scales is None else scales.reshape(own * slots, -1)
    return outputs_of(config, numbers, data.reshape(-1, hidden), flat).view(own, slots, hidden)


def check_slots(config: MoeConfig, buffer: Any, everyone: list[Tokens], received: Any, fp8: bool) -> None:
    rows, counts, (source, ranges, most, hidden, experts), _, _ = received
    assert (most, hidden, experts) == (config.max_tokens, config.hidden, EXPERTS)
    data, scales = rows if fp8 else (rows, None)
    data, scales = data.cpu().view(torch.uint8), None if scales is None else scales.cpu()
    source, ranges, counts = source.cpu(), ranges.cpu(), counts.cpu()
    for place, number in enumerate(config.experts_of(buffer.rank)):
        at = 0
        for rank, tokens in enumerate(everyone):
            wanted = torch.nonzero(tokens.indices == number)[:, 0]
            there = slice(at, at + len(wanted))
            assert int(ranges[place, rank]) == (at << 32) | len(wanted), (place, rank)
            assert torch.equal(source[place, there], wanted.int())
            assert torch.equal(data[place, there], tokens.x.view(torch.uint8)[wanted])
            if scales is not None and tokens.scales is not None:
                assert same(scales[place, there], tokens.scales[wanted])
            at += len(wanted)
        assert int(counts[place]) == at


def low(buffer: Any, top_k: int, dtype: str, empty: int, hooks: bool) -> None:
    """Slots, ranges and counts; weighted sums to the bit; a buffer for outputs, and a combine that comes again."""
    fp8 = dtype == "fp8"
    kind = torch.bfloat16 if fp8 else getattr(torch, dtype)
    config = shape_of(buffer, top_k, kind, fp8)
    for seed in range(3):
        rounded = seed == 1
        everyone = [given_by(rank, seed, top_k, kind, empty) for rank in range(buffer.group_size)]
        tokens = [cast_of(given, fp8, rounded) for given in everyone]
        x, idx, weights = (each.cuda() for each in everyone[buffer.rank])
        seen = torch.full((EXPERTS // buffer.group_size,), seed, dtype=torch.int32, device="cuda")
        received = buffer.low_latency_dispatch(
            x,
            idx,
            MOST,
            EXPERTS,
            cumulative_local_expert_recv_stats=seen,
            use_fp8=fp8,
            round_scale=rounded,
            return_recv_hook=hooks,
        )
        rows, counts, handle, _, hook = received
        if hook is not None:
            hook()
            hook()
        assert hooks == (hook is not None)
        assert torch.equal(seen - seed, counts)
        check_slots(config, buffer, tokens, received, fp8)
        outputs = run_slots(config, buffer, rows, fp8)
        right = expected(config, buffer.rank, tokens[buffer.rank])
        masked = weights.masked_fill(idx < 0, float("nan"))
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = outputs
            out = torch.full_like(x, float("nan"))
            sums, event, hook = buffer.low_latency_combine(
                outputs,
                idx,
                masked,
                handle,
                zero_copy=zero_copy,
                return_recv_hook=hooks,
                out=out,
            )
            event.current_stream_wait()
            if hook is not None:
                hook()
            assert sums is out and same(sums, right), f"zero_copy={zero_copy}, seed {seed}"


def other_scales(buffer: Any, hidden: int, most: int, whole_step: bool) -> None:
    """Scales of rows of other lengths, and of experts whose slots are no multiple of 8; many steps."""
    top_k = 10
    config = shape_of(buffer, top_k, torch.bfloat16, True, hidden=hidden, most=most)
    for seed in range(12):
        everyone = [given_by(rank, seed, top_k, hidden=hidden, most=most) for rank in range(buffer.group_size)]
        tokens = [cast_of(given, True, False) for given in everyone]
        x, idx, weights = (each.cuda() for each in everyone[buffer.rank])
        received = buffer.low_latency_dispatch(x, idx, most, EXPERTS, return_recv_hook=not whole_step)
        if received[4] is not None:
            received[4]()
        check_slots(config, buffer, tokens, received, True)
        outputs = run_slots(config, buffer, received[0], True)
        sums, _, _ = buffer.low_latency_combine(outputs, idx, weights, received[2])
        assert same(sums, expected(config, buffer.rank, tokens[buffer.rank])), f"seed {seed}"


def mantissas(buffer: Any) -> None:
    """Each mantissa of an element beside each of the block's peak, at several exponents: cast to the right bits."""
    shifts, values = torch.arange(1, 17), torch.arange(128, 256).float()
    x = values / 2.0 ** shifts.view(-1, 1, 1) * torch.ones(len(values), 1)
    x[:, :, 0] = values
    x[1::2] *= -1
    x[:, 7], x[2, :, 1] = -0.0, -0.0
    given = DeepEpTokens(
        x.view(len(shifts), -1).bfloat16(),
        (shifts % EXPERTS).view(-1, 1).to(topk_idx_t),
        torch.ones(len(shifts), 1),
    )
    config = shape_of(buffer, 1, torch.bfloat16, True, hidden=given.x.shape[1], most=len(shifts))
    for rounded in (False, True):
        tokens = [cast_of(given, True, rounded)] * buffer.group_size
        received = buffer.low_latency_dispatch(
            given.x.cuda(), given.idx.cuda(), len(shifts), EXPERTS, round_scale=rounded
        )
        check_slots(config, buffer, tokens, received, True)
        outputs = run_slots(config, buffer, received[0], True)
        buffer.low_latency_combine(outputs, given.idx.cuda(), given.weights.cuda(), received[2])


def cast_before(buffer: Any, block: int, empty: int) -> None:
    """Tokens that are fp8 already, with a scale for `block` elements, into the slots of the exchange itself."""
    top_k = 4
    config = dataclasses.replace(shape_of(buffer, top_k, torch.bfloat16, True), scale_block=block)
    for seed in range(3):
        everyone = [given_by(rank, seed, top_k, empty=empty) for rank in range(buffer.group_size)]
        tokens = [cast_of(given, True, False, block) for given in everyone]
        idx, weights = (each.cuda() for each in everyone[buffer.rank][1:])
        moe = buffer._gpus.slots(EXPERTS, top_k, HIDDEN, MOST, torch.float8_e4m3fn, block).moe
        own = tokens[buffer.rank].on(moe.device)
        step = moe.place(own.x, idx, own.scales)
        experts = len(moe.experts)
        rows = step.rows.view(experts, -1, HIDDEN), step.scales.transpose(1, 2)
        ranges = step.source_tokens.view(experts, -1), step.output.ranges, MOST, HIDDEN, EXPERTS
        check_slots(config, buffer, tokens, (rows, step.tokens_per_expert, ranges, None, None), True)
        outputs = run_slots(config, buffer, rows, True)
        sums = moe.weigh(outputs.view(-1, HIDDEN), step, weights)
        assert same(sums, expected(config, buffer.rank, tokens[buffer.rank])), f"block {block}, seed {seed}"


def waits(buffer: Any) -> None:
    """The nanoseconds that a late rank was waited for, by dispatch and by combine."""
    x, idx, weights = (each.cuda() for each in given_by(buffer.rank, 0, 3))
    dispatched, combined = (torch.zeros(buffer.group_size, dtype=torch.int64, device="cuda") for _ in range(2))
    for round_number in range(2):  # the first opens and loads
        dispatched.zero_()
        combined.zero_()
        settle()
        meet(buffer)
        time.sleep(LATE_S if buffer.rank == 0 and round_number else 0)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, MOST, EXPERTS, use_fp8=False, dispatch_wait_recv_cost_stats=dispatched
        )
        settle()
        meet(buffer)
        time.sleep(LATE_S if buffer.rank == 0 and round_number else 0)
        buffer.low_latency_combine(rows, idx, weights, handle, combine_wait_recv_cost_stats=combined)
        settle()
    for found in (dispatched.tolist(), combined.tolist()):
        assert found[buffer.rank] < LATE_S * 1e9 / 2, found
        assert all(0 <= each < 60e9 for each in found), found
        if buffer.rank:
            assert found[0] > LATE_S * 1e9 / 2, found


def packed(buffer: Any) -> None:
    """Scales as exponents, four in an int32, with and without a hook; on the communication stream with an event."""
    config = shape_of(buffer, 4, torch.bfloat16, True)
    for seed, more in enumerate(({}, {"return_recv_hook": True}, {"async_finish": True})):
        everyone = [given_by(rank, seed, 4) for rank in range(buffer.group_size)]
        tokens = [cast_of(given, True, True) for given in everyone]
        x, idx, weights = (each.cuda() for each in everyone[buffer.rank])
        (data, scales), counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, MOST, EXPERTS, round_scale=True, use_ue8m0=True, **more
        )
        if hook is not None:
            hook()
        event.current_stream_wait()
        assert scales.dtype == torch.int32 and scales.shape == (*data.shape[:2], HIDDEN // 512)
        exponents = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).int()
        wide = (exponents << 23).view(torch.float32)
        check_slots(config, buffer, tokens, ((data, wide), counts, handle, event, None), True)
        outputs = run_slots(config, buffer, (data, wide), True)
        again = {key: value for key, value in more.items() if key == "async_finish"}
        sums, event, _ = buffer.low_latency_combine(outputs, idx, weights, handle, **again)
        event.current_stream_wait()
        assert same(sums, expected(config, buffer.rank, tokens[buffer.rank]))


def overlap(buffer: Any) -> None:
    """CallHalves of two batches go out before those of the other come in; sums are asked for in the other order."""
    config = shape_of(buffer, 3, torch.bfloat16, False)
    batches = [given_by(buffer.rank, seed, 3) for seed in range(2)]
    on_gpu = [[each.cuda() for each in batch] for batch in batches]
    went = [
        buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False, return_recv_hook=True) for x, idx, _ in on_gpu
    ]
    for each in went:
        assert each[4] is not None
        each[4]()
    back = [
        buffer.low_latency_combine(run_slots(config, buffer, rows, False), idx, weights, handle, return_recv_hook=True)
        for (rows, _, handle, _, _), (_, idx, weights) in zip(went, on_gpu, strict=True)
    ]
    for (sums, _, hook), batch in reversed(list(zip(back, batches, strict=True))):
        assert hook is not None
        hook()
        assert same(sums, expected(config, buffer.rank, cast_of(batch, False, False)))


def graph(buffer: Any, fp8: bool, rounds: int) -> None:
    """A whole step in a graph, replayed with other tokens each time; wrong elements are counted on the GPU."""
    top_k, sets = 4, 6
    config = shape_of(buffer, top_k, torch.bfloat16, fp8)
    given = [given_by(buffer.rank, seed, top_k) for seed in range(sets)]
    x, idx = torch.zeros(MOST, HIDDEN).bfloat16().cuda(), torch.full((MOST, top_k), -1, dtype=topk_idx_t).cuda()
    weights, fresh, right = torch.zeros(MOST, top_k).cuda(), [], []
    for each in given:
        full = [torch.zeros_like(x), torch.full_like(idx, -1), torch.zeros_like(weights), torch.zeros_like(x)]
        sums = expected(config, buffer.rank, cast_of(each, fp8, False))
        for target, source in zip(full, (*each, sums), strict=True):
            target[: len(source)] = source.cuda()
        fresh.append(full[:3])
        right.append(full[3])

    def step() -> Any:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, MOST, EXPERTS, use_fp8=fp8, return_recv_hook=True
        )
        assert hook is not None
        hook()
        return buffer.low_latency_combine(run_slots(config, buffer, rows, fp8), idx, weights, handle)[0]

    step()
    captured, out = torch.cuda.CUDAGraph(), x
    for turn in range(buffer.group_size):  # a capture begins by waiting for the whole GPU
        settle()
        meet(buffer)
        if turn == buffer.rank:
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


def refused(buffer: Any) -> None:
    """What does not fit is refused by name, on all ranks before anything is sent."""
    x, idx, weights = (each.cuda() for each in given_by(buffer.rank, 0, 3))
    plain = {"use_fp8": False}
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, **plain)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: buffer.low_latency_dispatch(x, idx, 0, EXPERTS), ValueError, "num_max_dispatch_tokens_per_rank is 0"),
        (lambda: buffer.low_latency_dispatch(x.float(), idx, MOST, EXPERTS), TypeError, "torch.bfloat16 with use_fp8"),
        (lambda: buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_ue8m0=True), ValueError, "round_scale=True"),
        (
            lambda: buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, async_finish=True, return_recv_hook=True),
            ValueError,
            "exclude each other",
        ),
        (lambda: buffer.low_latency_combine(rows[:, :-1], idx, weights, handle), ValueError, "in the slots of"),
        (lambda: buffer.low_latency_combine(rows, idx, weights, handle, use_logfmt=True), ValueError, "use_logfmt"),
        (lambda: buffer.low_latency_combine(rows, idx, weights.half(), handle), TypeError, "weights must be of"),
        (
            lambda: buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, None, torch.zeros(1), **plain),
            ValueError,
            "dispatch_wait_recv_cost_stats must be int64",
        ),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    sums, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
    assert sums.shape == x.shape


def right_steps(buffer: Any, gone: tuple[int, ...]) -> None:
    """Steps of the ranks that are left; experts of those that are gone count as masked."""
    config = shape_of(buffer, 3, torch.bfloat16, False)
    for seed in range(3):
        given = given_by(buffer.rank, seed, 3)
        x, idx, weights = (each.cuda() for each in given)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
        sums, _, _ = buffer.low_latency_combine(run_slots(config, buffer, rows, False), idx, weights, handle)
        assert same(sums, expected(config, buffer.rank, cast_of(given, False, False), gone))


def masks(buffer: Any) -> torch.Tensor:
    status = torch.full((buffer.group_size,), 7, dtype=torch.int32, device="cuda")
    buffer.low_latency_query_mask_buffer(status)
    return status.cpu()


def missed(buffer: Any, lost: int, alive: bool) -> None:
    """A rank is gone, or alive and stays away: the mask calls name it, calls raise, and without it the others go on."""
    if buffer.rank == lost:
        meet(buffer)
        return
    assert masks(buffer).tolist() == [0] * buffer.group_size
    x, idx, _ = (each.cuda() for each in given_by(buffer.rank, 9, 3))
    buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    settle()
    wanted = [int(rank == lost) for rank in range(buffer.group_size)]
    assert masks(buffer).tolist() == wanted
    with pytest.raises(MissingRankError, match=f"waited for rank {lost}"):
        buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    buffer.low_latency_update_mask_buffer(lost, True)
    if alive:
        buffer._mask()
        meet(buffer)  # in one process nothing is opened where a kernel waits
    right_steps(buffer, (lost,))
    assert masks(buffer).tolist() == wanted
    with pytest.raises(ValueError, match="cannot come back"):
        buffer.low_latency_clean_mask_buffer()
