"""The ranks of an exchange among GPUs in one process: each with a fabric, a stream and few blocks; and what is right.

All blocks of all ranks of a GPU are on it at once, so that none waits for one that cannot start. Nothing here asks a
GPU anything between the launches of two ranks: the first would wait for the second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import torch

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeGroup
from asyncfabric.moe.gpu import CudaMoeExchange, CudaMoeHandle, CudaRankExchange, open_moe_cuda
from asyncfabric.moe.reference import reference_combine

BLOCKS = 96
"""Of all ranks of one GPU together, which has 132 multiprocessors."""
PATIENCE_S = 120.0
ONE_LOOP = ("trio",)
"""Of tests of many shapes of kernels: the shape and the event loop have nothing to do with each other."""
DEADLINE_S = 20.0
"""Of kernels, where a test has none of its own."""


class Tokens(NamedTuple):
    """What one rank dispatches; also the arguments of dispatch."""

    x: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None

    def on(self, device: torch.device) -> Tokens:
        """Return the same on a GPU."""
        return self.mapped(lambda each: each.to(device))

    def part(self, rows: slice) -> Tokens:
        """Return some of them."""
        return self.mapped(lambda each: each[rows])

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
        """Return what a function makes of each tensor."""
        scales = None if self.scales is None else change(self.scales)
        return Tokens(change(self.x), change(self.indices), change(self.weights), scales)


def tokens_of(config: MoeConfig, rank: int, seed: int, count: int | None = None, masked: float = 0.1) -> Tokens:
    """Random tokens, `count` of them or a random number; some choices are masked, some experts named twice."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    if count is None:
        count = int(torch.randint(0, config.max_tokens + 1, (1,), generator=random))
    x = torch.randn(count, config.hidden, generator=random).to(config.in_torch)
    indices = torch.randint(0, config.num_experts, (count, config.top_k), generator=random)
    indices[torch.rand(count, config.top_k, generator=random) < masked] = -1
    weights = torch.rand(count, config.top_k, generator=random) - 0.3
    scales = torch.rand(count, config.scales, generator=random) + 0.5 if config.scales else None
    return Tokens(x, indices, weights, scales)


def rank_tokens_of(config: MoeConfig, rank: int, seed: int, count: int | None = None, masked: float = 0.3) -> Tokens:
    """Random tokens for an exchange whose experts are its ranks: choice r is rank r, or masked."""
    tokens = tokens_of(config, rank, seed, count, masked)
    numbers = torch.arange(config.ranks).expand_as(tokens.indices)
    return tokens._replace(indices=torch.where(tokens.indices >= 0, numbers, -1))


def given_to(moe: CudaMoeExchange, tokens: Tokens) -> Tokens:
    """Return tokens on a rank's GPU, with the routes that its exchange takes: experts, or a bool for each rank."""
    by_rank = isinstance(moe, CudaRankExchange)
    return tokens._replace(indices=tokens.indices >= 0 if by_rank else tokens.indices).on(moe.device)


def outputs_of(
    config: MoeConfig, numbers: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """What experts make of rows: it depends on the number of each row's expert and on the scales."""
    wide = rows.float()
    if scales is not None:
        wide = wide * scales.repeat_interleave(config.scale_block, dim=1)
    number = numbers[:, None]
    return (wide * (number % 11 - 4.25) + number * 0.125).to(config.out_torch)


def run_experts(moe: CudaMoeExchange, handle: CudaMoeHandle) -> torch.Tensor:
    """The experts of a rank, without asking the GPU; padding becomes NaN, which must go nowhere."""
    place = torch.arange(len(handle.rows), dtype=torch.int32, device=moe.device)
    numbers = torch.searchsorted(handle.offsets, place, right=True) - 1 + moe.experts.start
    outputs = outputs_of(moe.config, numbers, handle.rows, handle.scales)
    counts = (handle.source_ranks >= 0) & (place < handle.offsets[-1])
    return torch.where(counts[:, None], outputs, float("nan"))


def expected(config: MoeConfig, rank: int, tokens: Tokens, gone: tuple[int, ...] = ()) -> torch.Tensor:
    """What combine must give, bit for bit; experts of the ranks that are gone count as masked."""
    indices = tokens.indices.clone()
    for other in gone:
        experts = config.experts_of(other)
        indices[(indices >= experts.start) & (indices < experts.stop)] = -1
    choices = [
        outputs_of(config, indices[:, choice].clamp(min=0), tokens.x, tokens.scales) for choice in range(config.top_k)
    ]
    return reference_combine(config, rank, torch.stack(choices, dim=1), indices, tokens.weights)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same byte for byte."""
    one = one.cpu()
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def grouped_right(config: MoeConfig, rank: int, handle: CudaMoeHandle, everyone: list[Tokens]) -> None:
    """Check the rows of a rank one by one: each choice of its experts once, in order, padding zeros."""
    rows = handle.rows.cpu().view(torch.uint8)
    scales = None if handle.scales is None else handle.scales.cpu()
    offsets, counts = handle.offsets.tolist(), handle.tokens_per_expert.tolist()
    # Stacked here: another rank's kernel may be waiting on the GPU, and the driver loads no code beside it.
    about = (handle.source_ranks, handle.source_tokens, handle.source_choices)
    sources = torch.stack([each.cpu() for each in about], dim=1).tolist()
    at = 0
    for place, number in enumerate(config.experts_of(rank)):
        assert offsets[place] == at and at % config.expert_alignment == 0
        wanted = [
            [source, int(token), int(choice)]
            for source in sorted(range(config.ranks), key=lambda each: divmod(each, config.node_size)[::-1])
            for token, choice in torch.nonzero(everyone[source].indices == number).tolist()
        ]
        assert counts[place] == len(wanted)
        assert sources[at : at + len(wanted)] == wanted
        for row, (source, token, _) in enumerate(wanted, at):
            assert torch.equal(rows[row], everyone[source].x[token].view(torch.uint8))
            if scales is not None:
                assert torch.equal(scales[row], everyone[source].scales[token])  # type: ignore[index]
        end = at + -(-len(wanted) // config.expert_alignment) * config.expert_alignment
        assert not rows[at + len(wanted) : end].any()
        assert sources[at + len(wanted) : end] == [[-1] * 3] * (end - at - len(wanted))
        at = end
    assert at == offsets[-1]


class Cast(NamedTuple):
    """The ranks of one process, and a stream for each."""

    ranks: list[CudaMoeExchange]
    streams: list[torch.cuda.Stream]

    async def settle(self) -> None:
        """Wait for all GPUs; proxies go on meanwhile."""
        for moe in self.ranks:
            await anyio.to_thread.run_sync(torch.cuda.synchronize, moe.device)
            moe.check()

    async def step(self, everyone: list[Tokens], split: bool = False, check_rows: bool = True) -> list[torch.Tensor]:
        """Do one step, by whole calls or by halves, and return what each rank got."""
        given = [given_to(moe, tokens) for tokens, moe in zip(everyone, self.ranks, strict=True)]
        outs = [
            torch.full((len(t.x), moe.config.hidden), 7, dtype=moe.config.out_torch, device=moe.device)
            for t, moe in zip(given, self.ranks, strict=True)
        ]
        await self.settle()
        handles = []
        for moe, stream, tokens in zip(self.ranks, self.streams, given, strict=True):
            with torch.cuda.stream(stream):
                handles.append(moe.dispatch_send(*tokens) if split else moe.dispatch(*tokens))
        if split:
            for moe, stream, handle in zip(self.ranks, self.streams, handles, strict=True):
                with torch.cuda.stream(stream):
                    moe.dispatch_recv(handle)
        await self.settle()
        if check_rows:
            for moe, handle in zip(self.ranks, handles, strict=True):
                grouped_right(moe.config, moe.rank, handle, everyone)
        rows = [run_experts(moe, handle) for moe, handle in zip(self.ranks, handles, strict=True)]
        await self.settle()
        for moe, stream, handle, made, out in zip(self.ranks, self.streams, handles, rows, outs, strict=True):
            with torch.cuda.stream(stream):
                if split:
                    moe.combine_send(made, handle)
                else:
                    moe.combine(made, handle, out=out)
        if split:
            for moe, stream, handle, out in zip(self.ranks, self.streams, handles, outs, strict=True):
                with torch.cuda.stream(stream):
                    moe.combine_recv(handle, out=out)
        await self.settle()
        return outs

    async def right_step(self, seed: int, **options: bool) -> None:
        """Do one step with random tokens and check all of it."""
        config = self.ranks[0].config
        everyone = [tokens_of(config, moe.rank, seed) for moe in self.ranks]
        for moe, tokens, out in zip(self.ranks, everyone, await self.step(everyone, **options), strict=True):
            assert same_bits(out, expected(config, moe.rank, tokens)), f"rank {moe.rank}, seed {seed}"


@asynccontextmanager
async def cast_of(
    config: MoeConfig,
    deadline_s: float | None = None,
    blocks: Sequence[int] | None = None,
    hosts: Sequence[int] | None = None,
    rail: str = "local",
    opening: Callable[..., Any] = open_moe_cuda,
) -> AsyncIterator[Cast]:
    """Open an exchange among ranks of this process, spread over its GPUs; `blocks` of each rank, or equally many.

    Ranks with different `hosts` know nothing of each other's memory and go by the proxy, over `rail`.
    """
    gpus = torch.cuda.device_count()
    found: dict[int, CudaMoeExchange] = {}
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            fabrics = [
                await stack.enter_async_context(af.open_fabric(af.FabricConfig(rails=(rail,))))
                for _ in range(config.ranks)
            ]
            addresses = [fabric.address for fabric in fabrics]
            leave, inside = anyio.Event(), anyio.Event()

            async def one(rank: int) -> None:
                opened = opening(
                    fabrics[rank],
                    MoeGroup(rank, addresses),
                    config,
                    device=f"cuda:{rank % gpus}",
                    hosts=hosts,
                    blocks=blocks[rank] if blocks else BLOCKS // -(-config.ranks // gpus),
                    deadline_s=deadline_s or DEADLINE_S,
                )
                async with opened as moe:
                    found[rank] = moe
                    if len(found) == config.ranks:
                        inside.set()
                    await leave.wait()

            async with anyio.create_task_group() as tasks:
                for rank in range(config.ranks):
                    tasks.start_soon(one, rank)
                await inside.wait()
                ranks = [found[rank] for rank in range(config.ranks)]
                try:
                    yield Cast(ranks, [torch.cuda.Stream(moe.device) for moe in ranks])  # type: ignore[no-untyped-call]
                finally:
                    with anyio.CancelScope(shield=True):
                        for moe in ranks:
                            await anyio.to_thread.run_sync(torch.cuda.synchronize, moe.device)
                    leave.set()
