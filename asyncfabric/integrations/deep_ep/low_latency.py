"""The low-latency calls of DeepEP's interface: a row for each choice of each token, in slots of fixed size.

One thread calls. GPU tensors go the way of `gpu_low_latency`. With host tensors calls block, and each choice travels as
a token of its own with one expert, as it does in DeepEP: then weights need to be known only where the sums are made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncfabric.integrations.deep_ep import gpu_low_latency
from asyncfabric.integrations.deep_ep.events import EventOverlap, refuse
from asyncfabric.integrations.deep_ep.gpu_low_latency import CallHalves, GpuLowLatencyHandle, TokenCast
from asyncfabric.integrations.deep_ep.gpu_room import GpuRoom
from asyncfabric.integrations.deep_ep.line_room import LineRoom
from asyncfabric.integrations.deep_ep.rows import Slots, check_choices, experts_of_rank, weighted_sums
from asyncfabric.integrations.deep_ep.step_line import LineStep
from asyncfabric.moe.fp8 import to_fp8

FP8_BLOCK = 128
Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LowLatencyHandle(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """(source token of each slot, range of each rank, most tokens of a rank, hidden, experts), and the step."""

    step: LineStep
    choices: torch.Size
    slots: Slots
    buffer: torch.Tensor | None = None


class LowLatencyCalls:
    """The low-latency half of Buffer."""

    _room: LineRoom
    _gpus: GpuRoom

    def _mask(self) -> None:
        """Go on without the ranks that were masked since the last call."""
        raise NotImplementedError

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of the bf16 slots of all experts; nothing depends on it."""
        return num_max_dispatch_tokens_per_rank * num_ranks * hidden * 2 * num_experts

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: the memory of the two kinds of calls is apart."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tokens, torch.Tensor, LowLatencyHandle | GpuLowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Send a row for each choice of each token to its expert.

        x is bf16 [tokens, hidden], without `use_fp8` also fp16 or fp32; the rest as in DeepEP. With a hook the rows are
        there once it was called. With GPU tensors all is done in the order of streams, and a graph may capture it; wait
        statistics are nanoseconds.

        Returns:
            (rows in slots, shape [own experts, ranks * num_max_dispatch_tokens_per_rank, hidden], with fp8 also their
            scales [.., .., hidden / 128]; filled slots of each expert; handle; event; hook or None).

        Raises:
            TypeError, ValueError: what does not fit, or is not there on a host.
            MissingRankError: a rank is lost or late.
        """
        check_choices(len(x), topk_idx)
        own, (count, top_k) = experts_of_rank(num_experts, self._room.ranks), topk_idx.shape
        most, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        if count > most:
            raise ValueError(f"x has {count} tokens, num_max_dispatch_tokens_per_rank is {most}")
        halves = CallHalves(async_finish, return_recv_hook)
        self._mask()
        if x.is_cuda:
            stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            cast = TokenCast(use_fp8, round_scale, use_ue8m0)
            return gpu_low_latency.dispatch(self._gpus, x, topk_idx, most, num_experts, stats, cast, halves)
        refuse("on a host", use_ue8m0=use_ue8m0, dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats)
        data, scales = to_fp8(x, FP8_BLOCK, power_of_two=round_scale) if use_fp8 else (x, None)
        line = self._room.line(num_experts, 1, hidden, most * top_k, data.dtype, FP8_BLOCK if use_fp8 else 0, x.dtype)
        spread = None if scales is None else scales.repeat_interleave(top_k, 0)
        step = line.send(data.repeat_interleave(top_k, 0), topk_idx.reshape(-1, 1).contiguous(), spread)
        slots = Slots(own, self._room.ranks, most, hidden, data.dtype, hidden // FP8_BLOCK if use_fp8 else 0)
        handle = LowLatencyHandle((slots.source, slots.range, most, hidden, num_experts))
        handle.step, handle.choices, handle.slots = step, topk_idx.shape, slots
        filled = False

        def hook() -> None:
            nonlocal filled
            if not filled:
                slots.fill(line.receive(step), top_k)
                filled = True
                if cumulative_local_expert_recv_stats is not None:
                    cumulative_local_expert_recv_stats.add_(slots.count)

        if not return_recv_hook:
            hook()
        rows: Tokens = (slots.x, slots.scales) if use_fp8 else slots.x
        return rows, slots.count, handle, EventOverlap(), hook if return_recv_hook else None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle | GpuLowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Return (for each own token the weighted sum of its experts' outputs, event, hook or None).

        x is bf16 in the slots of the dispatch; the rest as in DeepEP. Sums are in fp32 in the order of choices; those
        of GPU tensors are rounded for each rank, and then added up. With a hook the sums are there once it was called.
        Raises what `low_latency_dispatch` raises.
        """
        refuse("", use_logfmt=use_logfmt)
        halves = CallHalves(async_finish, return_recv_hook)
        if isinstance(handle, GpuLowLatencyHandle):
            shape = handle.step.topk_idx.shape
            if topk_idx.shape != shape:
                raise ValueError(
                    f"topk_idx must have the shape that was dispatched, {list(shape)}, got {list(topk_idx.shape)}"
                )
            if zero_copy:
                x = gpu_low_latency.combine_buffer(handle)
            waited = combine_wait_recv_cost_stats
            return gpu_low_latency.combine(self._gpus, x, topk_weights, handle, out, waited, halves)
        refuse("on a host", combine_wait_recv_cost_stats=combine_wait_recv_cost_stats)
        if topk_idx.shape != handle.choices:
            expected, got = list(handle.choices), list(topk_idx.shape)
            raise ValueError(f"topk_idx must have the shape that was dispatched, {expected}, got {got}")
        check_choices(len(topk_idx), topk_idx, topk_weights)
        if zero_copy:
            if handle.buffer is None:
                raise ValueError("zero_copy takes what get_next_low_latency_combine_buffer(handle) was filled with")
            x = handle.buffer
        line = handle.step.line
        step = line.send_back(handle.step, handle.slots.rows_of(x))
        sums = torch.empty(len(topk_idx), x.shape[2], dtype=x.dtype) if out is None else out

        def hook() -> None:
            sums.copy_(weighted_sums(line.receive_back(step), topk_idx, topk_weights, x.dtype))

        if not return_recv_hook:
            hook()
        return sums, EventOverlap(), hook if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle | GpuLowLatencyHandle) -> torch.Tensor:
        """Return a tensor for the outputs, in slots; `low_latency_combine(..., zero_copy=True)` then takes it."""
        if isinstance(handle, GpuLowLatencyHandle):
            return gpu_low_latency.combine_buffer(handle)
        if handle.buffer is None:
            slots = handle.slots.x
            handle.buffer = torch.zeros(slots.shape, dtype=handle.step.line.moe.config.out_torch)
        return handle.buffer
