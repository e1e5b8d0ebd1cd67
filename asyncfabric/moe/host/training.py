"""MoeTraining: dispatch and combine that torch differentiates, over two exchanges: one forward, one for gradients.

Called on worker threads (see `loop_caller`). The gradient of combine is a dispatch of the output's gradients along the
same routes, and the gradient of dispatch is a combine: so the backward pass of a layer is one step of the second
exchange. The gradient of each routing weight is known at the expert's rank; it travels in columns behind the row's own.

    out = sum over choices of  weight * expert(x)     x, weights --dispatch--> rows, row_weights --combine--> out
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio.from_thread
import torch
import torch.autograd.function
from torch.nn.functional import pad

from asyncfabric import Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.fp8 import from_fp8, to_fp8
from asyncfabric.moe.group import MoeGroup
from asyncfabric.moe.host.exchange import MoeExchange, open_moe
from asyncfabric.moe.host.handle import MoeHandle
from asyncfabric.moe.host.loop_caller import LoopCaller


@dataclass(slots=True, eq=False)
class _Routes:
    """What the backward pass of a step needs besides tensors; holds none of the step's rows.

    Attributes:
        indices: the experts of each token.
        wanted: whether anybody asks for the gradients of tokens or weights.
        back: the step of the backward pass, between its dispatch and its combine.
    """

    indices: torch.Tensor
    wanted: bool = False
    back: MoeHandle | None = None


@dataclass(slots=True, eq=False)
class TrainingStep:
    """What one `dispatch` brought to the experts of this rank.

    Attributes:
        rows: the tokens for experts of this rank, shape [rows, hidden], as in MoeHandle; differentiable.
        row_weights: the routing weight of each row, shape [rows], float32, 0 for padding; differentiable.
        tokens_per_expert: rows of each expert of this rank, without padding, int64.
        offsets: row at which each expert begins; the last entry is the number of rows. int64.
        handle: of the exchange's step.
        scales: None; rows that travelled in fp8 are scaled back already.
    """

    rows: torch.Tensor
    row_weights: torch.Tensor
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    handle: MoeHandle
    routes: _Routes
    scales: None = None


class MoeTraining:
    """Two open exchanges; made by `async with open_moe_training(...)`. Its calls block a worker thread.

    All ranks run the same layers in the same order, forward and backward, as with any collective: a rank without tokens
    too, and its loss must depend on the layer's output (the sum of nothing does). Gradients of experts are sums over
    the tokens of all ranks; those of x, of weights and of what computes them are the own rank's.

    Attributes:
        exchange: the one of the forward pass; inference may use it alone.
        config: its shape.
    """

    def __init__(self, exchange: MoeExchange, gradients: MoeExchange, caller: LoopCaller) -> None:
        """Not for users: `async with open_moe_training(...)`."""
        self.exchange: MoeExchange = exchange
        self.config: MoeConfig = exchange.config
        self._gradients = gradients
        self._caller = caller

    def dispatch(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> TrainingStep:
        """Send tokens to the ranks of their experts, and return the rows that came for the experts of this rank.

        Args:
            x: tokens, shape [tokens, hidden], of config.in_dtype; where that is fp8, of config.out_dtype: they are
                rounded to fp8 on the way, and have the gradient of tokens that are not rounded.
            indices: the experts of each token, shape [tokens, top_k], int32 or int64; -1 for none.
            weights: their weights, same shape, float32.

        Raises:
            TypeError, ValueError: tensors that do not fit the config.
            BusyError: config.in_flight steps are waiting to be combined.
            MissingRankError: a rank is lost, or late for the deadline of the cancel scopes or of `patience_s`.
            RuntimeError: called on the event loop's thread, or on a foreign thread without a portal.
        """
        sent, scales = x.detach(), None
        if self.config.scales:
            if x.dtype != self.config.out_torch:
                raise TypeError(f"x must be of {self.config.out_torch}, got {x.dtype}; it is rounded to fp8 here")
            sent, scales = to_fp8(sent, self.config.scale_block)
        indices = indices.contiguous()
        call = partial(self.exchange.dispatch, sent.contiguous(), indices, weights.detach().contiguous(), scales)
        handle, routes = self._caller.call(call), _Routes(indices)
        rows, row_weights = _Dispatch.apply(x, weights, self, handle, routes)  # type: ignore[no-untyped-call]
        assert handle.tokens_per_expert is not None and handle.offsets is not None
        return TrainingStep(rows, row_weights, handle.tokens_per_expert, handle.offsets, handle, routes)

    def combine(self, expert_rows: torch.Tensor, step: TrainingStep) -> torch.Tensor:
        """Send the outputs of this rank's experts back, and return the weighted sum for each own token.

        Args:
            expert_rows: outputs, same shape as `step.rows`, of config.out_dtype.
            step: of the layer.

        Returns:
            Shape [tokens, hidden] of config.out_dtype.

        Raises:
            TypeError, ValueError, MissingRankError, RuntimeError: as `dispatch`.
        """
        given = (expert_rows, step.row_weights, self, step.handle, step.routes)
        result: torch.Tensor = _Combine.apply(*given)  # type: ignore[no-untyped-call]
        return result

    async def exclude(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks in both passes, as MoeExchange.exclude; graphs made before have no backward pass.

        Raises:
            ValueError, MissingRankError: as MoeExchange.exclude.

        Cancellation: both exchanges are broken until another `exclude` succeeds.
        """
        gone = tuple(ranks)
        await self.exchange.exclude(gone)
        await self._gradients.exclude(gone)

    # ---- the two passes

    def _received(self, handle: MoeHandle) -> torch.Tensor:
        assert handle.rows is not None
        if handle.scales is not None:
            return from_fp8(handle.rows, handle.scales, self.config.out_torch)
        return handle.rows.detach()

    def _combined(self, expert_rows: torch.Tensor, handle: MoeHandle) -> torch.Tensor:
        return self._caller.call(partial(self.exchange.combine, expert_rows.detach().contiguous(), handle))

    def _spread_gradients(self, output_gradients: torch.Tensor, routes: _Routes) -> torch.Tensor:
        """Return the gradient of the output for each row of this rank: begins the step of the backward pass."""
        shape = self._gradients.config
        x = pad(output_gradients.to(shape.in_torch), (0, shape.hidden - self.config.hidden)).contiguous()
        ones = torch.ones(routes.indices.shape, dtype=torch.float32)
        handle = self._caller.call(partial(self._gradients.dispatch, x, routes.indices, ones))
        assert handle.rows is not None
        if routes.wanted:
            routes.back = handle
        else:  # nobody asks for the gradients of tokens and weights: the step ends here, on all ranks
            self._caller.call(partial(self._gradients.combine, torch.zeros_like(handle.rows), handle))
        return handle.rows[:, : self.config.hidden]

    def _gathered_gradients(
        self, rows: torch.Tensor, row_weights: torch.Tensor, routes: _Routes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of tokens and weights: ends the step of the backward pass."""
        handle, shape, hidden = routes.back, self._gradients.config, self.config.hidden
        if handle is None:
            raise RuntimeError(
                "the backward pass of a dispatch comes after that of its combine, once; is the output of combine() part"
                " of the loss, and of one backward pass only?"
            )
        routes.back = None
        full = torch.zeros((rows.shape[0], shape.hidden), dtype=shape.out_torch)
        full[:, :hidden] = rows
        assert handle.source_choices is not None
        (real,) = torch.nonzero(handle.source_choices >= 0, as_tuple=True)
        column, left = hidden + handle.source_choices[real], row_weights[real]
        for _ in range(_pieces(shape)):
            full[real, column] = left.to(shape.out_torch)
            left = left - full[real, column].float()
            column = column + shape.top_k
        sums = self._caller.call(partial(self._gradients.combine, full, handle))
        columns = sums[:, hidden : hidden + _pieces(shape) * shape.top_k].float()
        return sums[:, :hidden], columns.reshape(-1, _pieces(shape), shape.top_k).sum(dim=1)


@asynccontextmanager
async def open_moe_training(
    fabric: Fabric,
    group: MoeGroup,
    config: MoeConfig,
    *,
    portal: anyio.from_thread.BlockingPortal | None = None,
    patience_s: float | None = None,
) -> AsyncIterator[MoeTraining]:
    """Open the two exchanges of a training, with all ranks of a group.

    Args:
        fabric: of this rank.
        group: who takes part; the second exchange has the tag `<tag>/gradients`.
        config: of the forward pass, equal on all ranks. Gradients travel in config.out_dtype.
        portal: how the threads that train reach the event loop; None: they are threads of `anyio.to_thread.run_sync`.
        patience_s: seconds that one call may wait for other ranks; None: no limit besides cancel scopes.

    Raises:
        ValueError, DeviceError, MissingRankError, RemoteProtocolError: as `open_moe`.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    backward = replace(group, tag=f"{group.tag}/gradients")
    async with open_moe(fabric, group, config) as exchange, open_moe(fabric, backward, gradient_config(config)) as back:
        yield MoeTraining(exchange, back, LoopCaller(portal, patience_s))


def gradient_config(config: MoeConfig) -> MoeConfig:
    """Return the shape of the exchange that moves gradients: rows of out_dtype, with columns for those of weights.

    Raises:
        ValueError: tokens would travel in fp8 without scales.
    """
    if config.in_torch == torch.float8_e4m3fn and not config.scales:
        raise ValueError("a training rounds tokens to fp8 with scales; give scale_block, or another in_dtype")
    columns = -(-config.top_k * _pieces(config) // 16) * 16
    return replace(config, hidden=config.hidden + columns, in_dtype=config.out_dtype, scale_block=0)


def _pieces(config: MoeConfig) -> int:
    """Return how many numbers of out_dtype hold the gradient of a weight: two of 16 bits, what one rounds away."""
    return 1 if config.out_torch == torch.float32 else 2


class _Dispatch(torch.autograd.Function):
    """x, weights -> rows, row_weights; both were sent already."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, training: MoeTraining, handle: MoeHandle, routes: _Routes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.training, ctx.routes, ctx.dtypes = training, routes, (x.dtype, weights.dtype)
        routes.wanted = any(ctx.needs_input_grad)
        row_weights = handle.row_weights
        assert row_weights is not None
        return training._received(handle), row_weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, row_weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights = ctx.training._gathered_gradients(rows, row_weights, ctx.routes)
        return x.to(ctx.dtypes[0]), weights.to(ctx.dtypes[1]), None, None, None


class _Combine(torch.autograd.Function):
    """expert_rows, row_weights -> out."""

    @staticmethod
    def forward(
        ctx: Any,
        expert_rows: torch.Tensor,
        row_weights: torch.Tensor,
        training: MoeTraining,
        handle: MoeHandle,
        routes: _Routes,
    ) -> torch.Tensor:
        ctx.training, ctx.routes = training, routes
        ctx.save_for_backward(expert_rows, row_weights)
        return training._combined(expert_rows, handle)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        expert_rows, row_weights = ctx.saved_tensors
        rows = ctx.training._spread_gradients(output, ctx.routes).float()
        of_weights = (rows * expert_rows.float()).sum(dim=1)
        return (rows * row_weights[:, None]).to(expert_rows.dtype), of_weights, None, None, None
