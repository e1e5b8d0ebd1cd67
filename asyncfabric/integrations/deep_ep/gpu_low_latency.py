"""The low-latency calls of DeepEP's interface on GPU tensors: rows in slots, weights with `combine`, whole in a graph.

Runs on the caller's thread and on its current stream, or with `async_finish` on the communication stream. One launch
for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from asyncfabric.integrations.deep_ep.events import EventOverlap
from asyncfabric.integrations.deep_ep.gpu_room import FLOATS, GpuRoom
from asyncfabric.integrations.deep_ep.gpu_rows import packed_scales
from asyncfabric.integrations.deep_ep.gpu_slots import SlotStep
from asyncfabric.integrations.deep_ep.rows import experts_of_rank
from asyncfabric.moe.gpu.layout import FP8_BLOCK

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Hook = Callable[[], None]
PACKED_BLOCK = 4 * FP8_BLOCK


class GpuLowLatencyHandle(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """(source token of each slot, range of each rank, most tokens of a rank, hidden, experts), and the step."""

    step: SlotStep
    buffer: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenCast:
    """How tokens are cast before they are sent.

    Attributes:
        use_fp8: to float8_e4m3fn, with a scale for 128 elements.
        round_scale: scales are powers of two.
        use_ue8m0: scales are returned as their exponents, four in an int32.
    """

    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool

    def check(self, x: torch.Tensor) -> None:
        """Raise for tokens that cannot be cast so."""
        if x.dtype not in FLOATS or (self.use_fp8 and x.dtype != torch.bfloat16):
            wanted = "torch.bfloat16 with use_fp8=True" if self.use_fp8 else " or ".join(map(str, FLOATS))
            raise TypeError(f"x must be of {wanted}, got {x.dtype}")
        block = PACKED_BLOCK if self.use_ue8m0 else FP8_BLOCK
        if self.use_fp8 and x.shape[1] % block:
            raise ValueError(f"hidden must be a multiple of {block} for these scales, got {x.shape[1]}")
        if self.use_ue8m0 and not (self.use_fp8 and self.round_scale):
            raise ValueError("use_ue8m0=True needs use_fp8=True and round_scale=True")


@dataclass
class CallHalves:
    """How a call is cut, and ordered among streams; the arguments of DeepEP's interface.

    Attributes:
        async_finish: the current stream does not wait for the work.
        return_recv_hook: the call sends, and a hook receives.
        event: what the call returns.
    """

    async_finish: bool
    return_recv_hook: bool
    event: EventOverlap = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what DeepEP refuses."""
        self.event = EventOverlap()
        if self.async_finish and self.return_recv_hook:
            raise ValueError("async_finish=True and return_recv_hook=True exclude each other")

    @contextmanager
    def placed(self, gpus: GpuRoom, inputs: Iterable[torch.Tensor | None]) -> Iterator[list[torch.Tensor | None]]:
        """Work inside, on the stream that the call is for; yields a list for the tensors that it returns."""
        outputs: list[torch.Tensor | None] = []
        if not self.async_finish:
            yield outputs
            return
        current = gpus.comm.begin(None, inputs)
        with torch.cuda.stream(gpus.comm.stream):
            yield outputs
        self.event = gpus.comm.end(current, outputs, async_finish=True)


def dispatch(
    gpus: GpuRoom,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    most: int,
    num_experts: int,
    stats: tuple[torch.Tensor | None, torch.Tensor | None],
    cast: TokenCast,
    halves: CallHalves,
) -> tuple[Tokens, torch.Tensor, GpuLowLatencyHandle, EventOverlap, Hook | None]:
    """Do what `Buffer.low_latency_dispatch` does, and return what it returns; `stats`: of rows received, of waiting."""
    received, waited = stats
    cast.check(x)
    own, (_, hidden) = experts_of_rank(num_experts, gpus.room.ranks), x.shape
    _check_waited("dispatch_wait_recv_cost_stats", waited, gpus.room.ranks)
    dtype, block = (torch.float8_e4m3fn, FP8_BLOCK) if cast.use_fp8 else (x.dtype, 0)
    line = gpus.slots(num_experts, topk_idx.shape[1], hidden, most, dtype, block)
    with halves.placed(gpus, [x, topk_idx, received, waited]) as outputs:
        step = line.place(x, topk_idx, waited, whole=not halves.return_recv_hook, power_of_two=cast.round_scale)
        handle = step.handle
        assert handle is not None and handle.output.ranges is not None
        sources, ranges, counts = handle.source_tokens.view(own, -1), handle.output.ranges, handle.tokens_per_expert
        rows, found = handle.rows.view(own, -1, hidden), handle.scales
        shown = found.transpose(1, 2) if found is not None else None
        if cast.use_ue8m0 and found is not None:
            packed = torch.empty(own, found.shape[1] // 4, found.shape[2], dtype=torch.int32, device=x.device)
            shown = packed.transpose(1, 2)
        outputs += [rows, shown, found, sources, ranges, counts]
        finished = False

        def hook() -> None:
            nonlocal finished
            if finished:
                return
            line.receive(step)
            finished = True
            if cast.use_ue8m0 and shown is not None and found is not None:
                shown.copy_(packed_scales(found.transpose(1, 2)))
            if received is not None:
                received.add_(counts)

        if not halves.return_recv_hook:
            hook()
    made = GpuLowLatencyHandle((sources, ranges, most, hidden, num_experts))
    made.step = step
    tokens: Tokens = (rows, shown) if shown is not None else rows
    return tokens, counts, made, halves.event, hook if halves.return_recv_hook else None


def combine(
    gpus: GpuRoom,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    handle: GpuLowLatencyHandle,
    out: torch.Tensor | None,
    waited: torch.Tensor | None,
    halves: CallHalves,
) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
    """Do what `Buffer.low_latency_combine` does, and return what it returns."""
    line = handle.step.line
    config = line.moe.config
    _check_waited("combine_wait_recv_cost_stats", waited, config.ranks)
    slots = [len(line.moe.experts), config.ranks * config.max_tokens, config.hidden]
    if list(x.shape) != slots or not x.is_contiguous():
        raise ValueError(f"x must be contiguous in the slots of the dispatch, {slots}, got {list(x.shape)}")
    with halves.placed(gpus, [x, topk_weights, out, waited]) as outputs:
        rows = x.view(-1, config.hidden)
        step = line.weigh(handle.step, rows, topk_weights, out, waited, whole=not halves.return_recv_hook)
        sums = step.sums
        assert sums is not None
        outputs.append(sums)
    return sums, halves.event, (lambda: line.finish(step)) if halves.return_recv_hook else None


def combine_buffer(handle: GpuLowLatencyHandle) -> torch.Tensor:
    """Return a tensor for outputs, in the slots of a dispatch; the same one at each call."""
    if handle.buffer is None:
        moe = handle.step.line.moe
        shape = (len(moe.experts), moe.config.ranks * moe.config.max_tokens, moe.config.hidden)
        handle.buffer = torch.empty(shape, dtype=moe.config.out_torch, device=moe.device)
    return handle.buffer


def _check_waited(name: str, stats: torch.Tensor | None, ranks: int) -> None:
    if stats is None:
        return
    if stats.dtype != torch.int64 or list(stats.shape) != [ranks] or not stats.is_cuda:
        raise ValueError(f"{name} must be int64 [{ranks}] on the GPU, got {stats.dtype} {list(stats.shape)}")
