"""`dispatch` and `combine` of DeepEP's interface on GPU tensors: a row for each rank that a token goes to.

Runs on the caller's thread; the work is on the communication stream. In this exchange each rank is one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncfabric.integrations.deep_ep.events import EventOverlap
from asyncfabric.integrations.deep_ep.gpu_room import FLOATS, GpuRoom
from asyncfabric.integrations.deep_ep.gpu_rows import choices_in, words_of
from asyncfabric.integrations.deep_ep.gpu_steps import GpuStep
from asyncfabric.integrations.deep_ep.gpu_streams import check_streams
from asyncfabric.integrations.deep_ep.rows import Bias, about_width, counts_of, experts_of_rank, with_biases

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StreamOrder:
    """How a call is ordered among streams; the arguments of DeepEP's interface.

    Attributes:
        previous_event: that the work waits for, in place of the current stream.
        async_finish: the current stream does not wait for the work.
        allocate_on_comm_stream: tensors are made on the communication stream.
    """

    previous_event: EventOverlap | None = None
    async_finish: bool = False
    allocate_on_comm_stream: bool = False

    def __post_init__(self) -> None:
        """Refuse what DeepEP refuses."""
        check_streams(
            self.previous_event,
            async_finish=self.async_finish,
            allocate_on_comm_stream=self.allocate_on_comm_stream,
        )


class GpuDispatchHandle(tuple[torch.Tensor, ...]):
    """(rows up to each rank's, their ranks' bounds, source of each row, which token goes where), and the step.

    The first is DeepEP's rank_prefix_matrix, int32 [ranks, ranks], of which only the column of this rank is known.
    """

    step: GpuStep
    is_token_in_rank: torch.Tensor


class GpuDispatch:
    """The calls of one buffer on GPU tensors."""

    def __init__(self, gpus: GpuRoom, max_tokens: int) -> None:
        """Use exchanges for at most so many tokens of a rank."""
        self._gpus = gpus
        self._max_tokens = max_tokens

    def dispatch(
        self,
        x: Tokens,
        is_token_in_rank: torch.Tensor,
        tokens_per_expert: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        expert_alignment: int,
        worst: int,
        streams: StreamOrder,
        again: GpuDispatchHandle | None = None,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int], GpuDispatchHandle, EventOverlap]:
        """Do what `Buffer.dispatch` does, and return what it returns."""
        room = self._gpus.room
        data, scales = x if isinstance(x, tuple) else (x, None)
        if not worst and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a graph is being captured: dispatch cannot wait for the number of rows; give num_worst_tokens"
            )
        comm = self._gpus.comm
        top_k = topk_idx.shape[1] if topk_idx is not None and topk_weights is not None else 0
        at = scales.shape[1] if scales is not None else 0
        line = self._gpus.line(data.shape[1], self._max_tokens, data.dtype, at + 2 * top_k)
        inputs = [data, scales, is_token_in_rank, topk_idx, topk_weights]
        current = comm.begin(streams.previous_event, inputs)
        with torch.cuda.stream(comm.stream):
            # A copy: the step may be sent again, when the caller has made something else of the tensor.
            in_rank = again.step.in_rank if again is not None else is_token_in_rank.clone()
            width = line.moe.config.scales
            words = words_of(width, scales, topk_weights, topk_idx, data) if width else None
            step = line.send(data.contiguous(), in_rank, words)
            given = step.handle
            assert given is not None
            filled = given.offsets[-1:]
            count = worst or int(filled)
            step.rows = None if worst else count
            rows = _first(given.rows, count)
            recv_idx = recv_weights = None
            per_expert: list[int] = []
            came = _first(given.scales, count) if given.scales is not None else None
            own = 0 if tokens_per_expert is None else experts_of_rank(len(tokens_per_expert), room.ranks)
            if top_k and came is not None:
                mine = range(room.rank * own, (room.rank + 1) * own)
                recv_idx, recv_weights = choices_in(came, at, top_k, mine, filled if worst else None)
                if not worst:
                    per_expert = counts_of(recv_idx, own).tolist()
            recv_scales = came[:, :at].contiguous() if scales is not None and came is not None else None
            sources = _first(given.source_tokens, count)
        if not top_k and not worst and again is None and tokens_per_expert is not None:
            everywhere = torch.tensor(room.gathered(tokens_per_expert.tolist()), dtype=torch.int64).sum(0)
            per_expert = everywhere[room.rank * own : (room.rank + 1) * own].tolist()
        handle = again
        if handle is None:
            handle = GpuDispatchHandle(
                (_prefixes(given.source_ranks, filled, room.ranks, room.rank), sources, is_token_in_rank)
            )
        handle.step, handle.is_token_in_rank = step, is_token_in_rank
        outputs = [rows, recv_scales, recv_idx, recv_weights, sources]
        event = comm.end(current, outputs, async_finish=streams.async_finish)
        rounded = [-(-each // expert_alignment) * expert_alignment for each in per_expert]
        received: Tokens = (rows, recv_scales) if recv_scales is not None else rows
        return received, recv_idx, recv_weights, rounded, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: GpuDispatchHandle,
        topk_weights: torch.Tensor | None,
        bias: Bias,
        streams: StreamOrder,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Do what `Buffer.combine` does, and return what it returns."""
        known = handle.step.rows
        if known is not None and len(x) < known:
            raise ValueError(f"x has {len(x)} rows, the dispatch of this handle brought {known}")
        comm = self._gpus.comm
        more: Any = bias if isinstance(bias, tuple) else (bias,)
        current = comm.begin(streams.previous_event, [x, topk_weights, *more])
        with torch.cuda.stream(comm.stream):
            weights = None
            if topk_weights is not None:
                top_k = topk_weights.shape[1]
                line = self._gpus.line(about_width(top_k), self._max_tokens, torch.float32, 0)
                rows = torch.zeros(len(topk_weights), about_width(top_k), dtype=torch.float32, device=x.device)
                rows[:, :top_k] = topk_weights
                nothing = torch.zeros(len(handle.is_token_in_rank), rows.shape[1], dtype=torch.float32, device=x.device)
                step = line.send(nothing, handle.step.in_rank, None)
                weights = line.send_back(step, rows)[:, :top_k].contiguous()
            sums = with_biases(self._line_for(x, handle).send_back(handle.step, x.contiguous()), bias)
        event = comm.end(current, [sums, weights], async_finish=streams.async_finish)
        return sums, weights, event

    def _line_for(self, x: torch.Tensor, handle: GpuDispatchHandle) -> Any:
        line = handle.step.line
        if x.dtype != line.moe.config.out_torch:
            if x.dtype not in FLOATS:
                raise TypeError(f"combine takes {' or '.join(map(str, FLOATS))}, got {x.dtype}")
            # What was dispatched as another type is dispatched again as this one; only its routes matter.
            line = self._gpus.line(x.shape[1], self._max_tokens, x.dtype, 0)
            known = handle.step.rows
            handle.step = GpuStep(line, handle.step.in_rank, None, captured=False, rows=known)
        return line


def _first(given: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first rows as a tensor of their own; those that there are not are zeros."""
    wide = given.view(torch.uint8) if given.dtype.itemsize == 1 else given
    made = wide[:count].clone()
    if len(made) < count:
        made = torch.cat([made, made.new_zeros(count - len(made), *made.shape[1:])])
    return made.view(given.dtype)


def _prefixes(source_ranks: torch.Tensor, filled: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return how many rows came from ranks 0..i in row i, column `rank`; zeros elsewhere."""
    there = torch.arange(len(source_ranks), dtype=torch.int32, device=source_ranks.device) < filled
    each = torch.arange(ranks, dtype=torch.int32, device=source_ranks.device)
    counts = ((source_ranks[None, :] <= each[:, None]) & there).sum(1)
    prefixes = torch.zeros(ranks, ranks, dtype=torch.int32, device=source_ranks.device)
    prefixes[:, rank] = counts.int()
    return prefixes
