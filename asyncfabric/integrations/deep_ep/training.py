"""Training through a Buffer: a dispatch and a combine that torch differentiates, of host tensors and of GPU tensors.

Runs on the caller's thread; torch runs the backward pass of GPU tensors on a thread of its own, one call at a time, on
the streams of the forward pass, and a Buffer follows the current stream. Each backward pass is a call of the Buffer.

    x, weights --dispatch--> rows, row weights --experts--> outputs --combine--> y
    gradient of outputs = dispatch(gradient of y)        gradient of x, weights = combine(gradient of rows, row weights)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.autograd.function

from asyncfabric.integrations.deep_ep.buffer import Buffer, DispatchHandle
from asyncfabric.integrations.deep_ep.gpu_dispatch import GpuDispatchHandle
from asyncfabric.integrations.deep_ep.gpu_room import FLOATS

INTEGERS = (torch.int64, torch.int32)


@dataclass(slots=True, eq=False)
class _RowRoutes:
    """What the calls about one dispatch share besides tensors of the graph.

    Attributes:
        buffer: that the calls go through.
        handle: of the buffer's dispatch; None before it.
        shape: of the rows that came.
        tokens_per_expert: choices of each own expert.
        gone: ranks that the dispatch went without.
    """

    buffer: Buffer
    handle: DispatchHandle | GpuDispatchHandle | None = None
    shape: tuple[int, int] = (0, 0)
    tokens_per_expert: list[int] = field(default_factory=list)
    gone: frozenset[int] = frozenset()

    def opened(self) -> DispatchHandle | GpuDispatchHandle:
        """Return the handle; raises RuntimeError where ranks were excluded or masked since the dispatch."""
        assert self.handle is not None
        gone = frozenset(self.buffer._gone | self.buffer._masked)
        if gone != self.gone:
            raise RuntimeError(
                f"ranks {sorted(gone - self.gone)} were excluded since the dispatch, and its rows are lost; begin the"
                " training step again, on all ranks that are left"
            )
        return self.handle


@dataclass(slots=True, eq=False)
class TrainingHandle:
    """One dispatch, for its combine; made by `dispatch`.

    The link has no elements. It ties the combine to the dispatch in the graph, so that both have their backward pass on
    a rank whose experts got no row, too.
    """

    routes: _RowRoutes
    link: torch.Tensor


class ReceivedRows(NamedTuple):
    """What a dispatch brought for the experts of this rank.

    Attributes:
        rows: shape [rows, hidden], of the dtype of x: each token once that has an expert here, in the order of ranks,
            then of tokens; differentiable.
        topk_idx: shape [rows, top_k], int64: experts, counted from this rank's first; -1 for those of other ranks.
        topk_weights: shape [rows, top_k], float32, 0 where topk_idx is -1; differentiable.
        tokens_per_expert: how often topk_idx has each expert of this rank.
        handle: for `combine`.
    """

    rows: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    tokens_per_expert: list[int]
    handle: TrainingHandle


def dispatch(
    buffer: Buffer, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> ReceivedRows:
    """Send each token once to every rank that has an expert of it, and return the rows that came.

    All ranks make the same calls in the same order, with the same `requires_grad` of their tensors, and run the
    backward passes alike: each is a call of the Buffer too. A rank without tokens does so as well; its loss must depend
    on what `combine` returns, for which the sum of nothing is enough.

    Gradients of x and topk_weights are those of the own tokens, those of an expert's parameters sums over the tokens of
    all ranks. Rows of gradients travel in the dtype of x and are added up in fp32, gradients of weights in float32.

    On a GPU the work is on the current stream, and the host waits for the number of rows, as in `Buffer.dispatch`.
    The backward pass runs on the stream that was current here; the host waits in the first one, which opens exchanges.
    Ranks are processes there: torch has one thread for the backward passes of a GPU.

    Args:
        buffer: of this rank.
        x: tokens, shape [tokens, hidden], bf16, fp16 or fp32; on a host or a GPU.
        topk_idx: their experts, shape [tokens, top_k], int64 or int32; -1 for none.
        topk_weights: their weights, same shape; what is no float32 becomes one.
        num_experts: of all ranks, a multiple of their number; rank r has the r-th part.

    Raises:
        TypeError, ValueError: what does not fit; nothing is sent.
        MissingRankError: a rank is lost or late.
        RuntimeError: in the backward pass, where ranks were excluded since.
    """
    _check_tokens(x, topk_idx, topk_weights)
    routes = _RowRoutes(buffer)
    given = (x, topk_weights.float(), topk_idx, num_experts, routes)
    rows, idx, weights, link = _BufferDispatch.apply(*given)  # type: ignore[no-untyped-call]
    return ReceivedRows(rows, idx, weights, routes.tokens_per_expert, TrainingHandle(routes, link))


def combine(buffer: Buffer, rows: torch.Tensor, handle: TrainingHandle) -> torch.Tensor:
    """Return for each own token the sum of its rows from all ranks, in fp32 and rounded once; weights are the caller's.

    What `dispatch` states about ranks and streams holds here.

    Args:
        buffer: that dispatched.
        rows: the outputs, of the shape and dtype of the rows that were dispatched, in their order; each is the weighted
            sum of the outputs of this rank's experts.
        handle: of the dispatch; it may be combined several times, on all ranks alike.

    Returns:
        Shape [tokens, hidden], of the dtype of rows.

    Raises:
        TypeError, ValueError: rows or a handle that do not fit; nothing is sent.
        MissingRankError, RuntimeError: as `dispatch`.
    """
    if handle.routes.buffer is not buffer:
        raise ValueError("the handle is of another Buffer; give combine the Buffer that dispatched")
    if rows.shape != handle.routes.shape:
        wanted, got = list(handle.routes.shape), list(rows.shape)
        raise ValueError(f"rows must have the shape {wanted} of the rows that were dispatched, got {got}")
    like = handle.link
    if rows.dtype != like.dtype or rows.device != like.device:
        raise TypeError(
            f"rows must be {like.dtype} on {like.device}, as x was in the dispatch, got {rows.dtype} on {rows.device}"
        )
    result: torch.Tensor = _BufferCombine.apply(rows, like, handle.routes)  # type: ignore[no-untyped-call]
    return result


def _check_tokens(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must have the shape [tokens, hidden], got {list(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be {', '.join(map(str, FLOATS))}, got {x.dtype}; training sends no fp8")
    if topk_idx.dtype not in INTEGERS:
        raise TypeError(f"topk_idx must be {' or '.join(map(str, INTEGERS))}, got {topk_idx.dtype}")
    devices = [each.device for each in (x, topk_idx, topk_weights)]
    if len(set(devices)) > 1:
        raise ValueError(f"x, topk_idx and topk_weights must be on one device, got {', '.join(map(str, devices))}")


class _BufferDispatch(torch.autograd.Function):
    """x, weights -> rows, experts, row weights, link."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, topk_idx: torch.Tensor, num_experts: int, routes: _RowRoutes
    ) -> tuple[torch.Tensor, ...]:
        buffer = routes.buffer
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        rows, idx, row_weights, counts, routes.handle, _ = buffer.dispatch(
            x.detach(),
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights.detach(),
        )
        assert isinstance(rows, torch.Tensor)
        assert idx is not None and row_weights is not None and counts is not None
        routes.shape, routes.tokens_per_expert = (len(rows), x.shape[1]), counts
        routes.gone = frozenset(buffer._gone)
        ctx.routes = routes
        ctx.save_for_backward(idx)
        ctx.mark_non_differentiable(idx)
        return rows.detach(), idx, row_weights, rows.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, rows: torch.Tensor, _: torch.Tensor, row_weights: torch.Tensor, _link: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (idx,) = ctx.saved_tensors
        routes: _RowRoutes = ctx.routes
        # What arrived for a choice of another rank was a 0, not the weight.
        own = row_weights.masked_fill(idx < 0, 0.0)
        x, weights, _event = routes.buffer.combine(rows, routes.opened(), topk_weights=own)
        return x, weights, None, None, None


class _BufferCombine(torch.autograd.Function):
    """rows, link -> y."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, link: torch.Tensor, routes: _RowRoutes) -> torch.Tensor:
        ctx.routes = routes
        sums, _, _ = routes.buffer.combine(rows.detach(), routes.opened())
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        routes: _RowRoutes = ctx.routes
        count = routes.shape[0]
        # On a GPU a number here has the host not wait for the number of rows, which is known; 0 would have it wait.
        known = max(count, 1) if sums.is_cuda else 0
        rows, *_ = routes.buffer.dispatch(sums, handle=routes.opened(), num_worst_tokens=known)
        assert isinstance(rows, torch.Tensor)
        return rows[:count], sums.new_empty(0), None
