"""The sparse blocks of transformers' Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3, run expert-parallel.

    config = config_for(model, ranks=4, max_tokens=512)
    async with open_moe(fabric, MoeGroup(rank, addresses), config) as moe:
        parallelize(model, moe)
        tokens = await anyio.to_thread.run_sync(partial(model.generate, prompt, max_new_tokens=32))

Threads: the model runs on a worker thread, the exchange on the event loop's. A block's `forward` asks the loop for each
half of a step and computes between them; `forward_async` does both on the loop's thread. Over a MoeTraining in the
place of the exchange, blocks are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import torch

from asyncfabric.errors import InternalError
from asyncfabric.integrations.expert_shard import ExpertShard
from asyncfabric.moe import LoopCaller, MoeConfig, MoeExchange, MoeHandle, MoeTraining
from asyncfabric.moe.fp8 import to_fp8

KNOWN_BLOCKS = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "DeepseekV3MoE")
Half = Callable[[], Coroutine[Any, Any, Any]]
"""One half of a step, to be run on the event loop's thread."""


class ParallelBlock(torch.nn.Module):
    """A sparse block whose experts live on all ranks of an exchange; in a model it stands where the block stood.

    The router and, where the block has one, the shared expert are on every rank and see the rank's own tokens. The
    shared expert is computed while the tokens travel. All ranks must run their blocks in the same order, as with any
    collective: a rank without tokens runs them with none. A forward that failed or was cancelled leaves its step
    unfinished: then all ranks `await moe.exclude(ranks)`, with no rank if none is lost, before the next one. Over an
    exchange no parameter has a gradient; over a training those have one that had one before: the experts' is the sum
    over the tokens of all ranks, the router's and the shared expert's is of the own tokens.

    Attributes:
        gate: the router.
        shard: the experts of this rank.
        shared_expert: the shared expert or None, and `shared_expert_gate`, its gate or None.
        caller: how `forward` reaches the event loop; its `patience_s` bounds one half, besides cancel scopes.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        moe: MoeExchange | MoeTraining,
        *,
        tile_rows: int = 0,
        portal: anyio.from_thread.BlockingPortal | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Take the router and this rank's experts from a block of transformers.

        Raises:
            TypeError: a block of another kind.
            ValueError: the exchange is not for blocks of this shape, see `config_for`.
        """
        super().__init__()
        experts = _experts_of(block)
        wanted = _shape_of(block)
        training, moe = (moe, moe.exchange) if isinstance(moe, MoeTraining) else (None, moe)
        given = (moe.config.num_experts, moe.config.top_k, moe.config.hidden, moe.config.out_torch)
        if given != wanted:
            raise ValueError(f"the block has (experts, top_k, hidden, dtype) {wanted}, the exchange {given}")
        own = slice(moe.experts.start, moe.experts.stop)
        self.gate: Any = block.gate
        self.shard: ExpertShard = ExpertShard(
            experts.gate_up_proj[own], experts.down_proj[own], experts.act_fn, tile_rows
        )
        self.shared_expert: Any = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
        self.shared_expert_gate: Any = getattr(block, "shared_expert_gate", None)
        if training is None:
            self.requires_grad_(False)
        else:
            self.shard.gate_up_proj.requires_grad_(experts.gate_up_proj.requires_grad)
            self.shard.down_proj.requires_grad_(experts.down_proj.requires_grad)
        self.caller: LoopCaller = LoopCaller(portal, patience_s)
        self._moe = moe
        self._training = training

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the block's output for shape [..., hidden]; called by a model on a worker thread, never on the loop's.

        Raises:
            RuntimeError: called on the event loop's thread, on a thread that anyio did not start and without a portal,
                or with gradients over an exchange that is no training.
            MissingRankError: a rank is lost, or late for the deadline of the cancel scopes around the worker thread.
            ValueError: more tokens than the exchange takes.
        """
        if self._training is not None and torch.is_grad_enabled():
            return self._differentiable(self._training, hidden_states)
        computing = self._compute(hidden_states, self._blocking)
        try:
            computing.send(None)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
        raise InternalError("a forward on a worker thread was suspended")

    async def forward_async(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the block's output for shape [..., hidden]; computes on the event loop's thread.

        Raises:
            RuntimeError: the input wants a gradient.
            MissingRankError: a rank is lost, or late for the caller's deadline.
            ValueError: more tokens than the exchange takes.

        Cancellation: the step stays unfinished; see the class.
        """
        return await self._compute(hidden_states, self.caller.patiently)

    async def _compute(
        self, hidden_states: torch.Tensor, on_loop: Callable[[Half], Coroutine[Any, Any, Any]]
    ) -> torch.Tensor:
        """Compute on the caller's thread; `on_loop` runs a half on the loop's. Where that blocks, nothing suspends."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError(
                "an exchange has no backward pass: call the model under torch.inference_mode(), or open_moe_training()"
                " and forward() on a worker thread"
            )
        moe = self._moe
        tokens = hidden_states.reshape(-1, moe.config.hidden)
        _, weights, indices = self.gate(tokens)
        x, scales = to_fp8(tokens, moe.config.scale_block) if moe.config.scales else (tokens, None)
        sent = (x.contiguous(), indices.contiguous(), weights.float().contiguous(), scales)
        handle: MoeHandle = await on_loop(partial(moe.dispatch_send, *sent))
        beside = self._shared(tokens)
        await on_loop(partial(moe.dispatch_recv, handle))
        routed: torch.Tensor = await on_loop(partial(moe.combine, self.shard(handle), handle))
        return (routed if beside is None else routed + beside).reshape(hidden_states.shape)

    def _differentiable(self, training: MoeTraining, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, training.config.hidden)
        _, weights, indices = self.gate(tokens)
        step = training.dispatch(tokens, indices, weights.float())
        routed, beside = training.combine(self.shard(step), step), self._shared(tokens)
        return (routed if beside is None else routed + beside).reshape(hidden_states.shape)

    def _shared(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self.shared_expert is None:
            return None
        shared: torch.Tensor = self.shared_expert(tokens)
        gate = self.shared_expert_gate
        return shared if gate is None else torch.sigmoid(gate(tokens)) * shared

    async def _blocking(self, half: Half) -> Any:
        """Block this thread while the loop's runs a half; awaits nothing."""
        return self.caller.call(half)


def config_for(model: torch.nn.Module, *, ranks: int, max_tokens: int, **options: Any) -> MoeConfig:
    """Return the shape of the exchange for the sparse blocks of a model.

    Args:
        model: of transformers; its blocks must have one shape.
        ranks: of the exchange.
        max_tokens: most tokens of one forward on one rank: all prompts of a batch together.
        **options: any further value of MoeConfig; `in_dtype="float8_e4m3fn", scale_block=128` sends tokens in fp8.

    Raises:
        ValueError: the model has no block that is known, or blocks of several shapes.
    """
    shapes = {_shape_of(block) for _, _, block in _found(model)}
    if len(shapes) != 1:
        raise ValueError(f"an exchange has one shape, the sparse blocks of the model have {sorted(map(str, shapes))}")
    num_experts, top_k, hidden, dtype = shapes.pop()
    name = str(dtype).removeprefix("torch.")
    return MoeConfig(
        **{"in_dtype": name, "out_dtype": name} | options,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        ranks=ranks,
        max_tokens=max_tokens,
    )


def parallelize(
    model: torch.nn.Module,
    moe: MoeExchange | MoeTraining,
    *,
    tile_rows: int = 0,
    portal: anyio.from_thread.BlockingPortal | None = None,
    patience_s: float | None = None,
) -> list[ParallelBlock]:
    """Put a ParallelBlock in the place of every sparse block of a model, and return them in the order of layers.

    The weights of the other ranks' experts are let go. Arguments are those of ParallelBlock.

    Raises:
        ValueError: the model has no block that is known, or the exchange is for another shape; nothing was replaced.
    """
    found = _found(model)
    made = [
        ParallelBlock(block, moe, tile_rows=tile_rows, portal=portal, patience_s=patience_s) for _, _, block in found
    ]
    for (parent, name, _), block in zip(found, made, strict=True):
        setattr(parent, name, block)
    return made


def _found(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Return (parent, name, block) of each sparse block; raises ValueError when there is none."""
    found = [
        (parent, name, block)
        for parent in model.modules()
        for name, block in parent.named_children()
        if type(block).__name__ in KNOWN_BLOCKS
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no sparse block of a known kind: {', '.join(KNOWN_BLOCKS)}")
    return found


def _experts_of(block: torch.nn.Module) -> Any:
    experts = getattr(block, "experts", None)
    if type(block).__name__ not in KNOWN_BLOCKS or not isinstance(getattr(experts, "gate_up_proj", None), torch.Tensor):
        raise TypeError(
            f"{type(block).__name__} is no sparse block of a known kind with packed weights: {', '.join(KNOWN_BLOCKS)}"
            " of transformers 5"
        )
    return experts


def _shape_of(block: torch.nn.Module) -> tuple[int, int, int, torch.dtype]:
    experts = _experts_of(block)
    num_experts, _, hidden = experts.gate_up_proj.shape
    gate: Any = block.gate
    return num_experts, gate.top_k, hidden, experts.gate_up_proj.dtype
