"""What both children are made of: the parent's orders, the model, a fabric with a pool of pages, the one peer.

A trio program on the public API of asyncfabric. The forward passes run on a worker thread; nothing else here runs
outside the event loop.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import trio

import asyncfabric as af
from asyncfabric.kv import KvLayout, KvPool, open_pool
from asyncfabric_services.children.line_channel import LineChannel
from asyncfabric_services.children.worker import ParentPipes, take_pipes
from asyncfabric_services.demo.pair.generation import prefill
from asyncfabric_services.demo.pair.model import PairModel, load_model
from asyncfabric_services.demo.pair.paged_cache import PairPagedCache
from asyncfabric_services.demo.pair.protocol import Finish, Meet, PairFailed, PairGoodbye, PairHello, Start, ToChild
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.exits import CHECK_FAILED, DEADLINE, FINE, UNFIT

SPARE = 2  # the pool has this many times the pages that the longest prompt needs, so that leases are scattered


@dataclass(frozen=True)
class PairNode:
    """One child, ready to serve.

    Attributes:
        settings: what the demo runs on.
        parent: where figures go.
        orders: of the parent.
        loaded: the model.
        pool: pages and a context slot, in memory of the model's device and of the host.
        pages: the pool as a tensor [layers][pages][2][heads][tokens][dim].
        peer, peer_layout: where the other child's fabric is, and how its pages lie.
    """

    settings: DemoSettings
    parent: LineChannel
    orders: trio.MemoryReceiveChannel[ToChild]
    loaded: PairModel
    pool: KvPool
    pages: torch.Tensor
    peer: af.FabricAddress
    peer_layout: KvLayout


Serve = Callable[[PairNode], Awaitable[None]]


def run_child(serve: Serve, *, gpu: int = 0) -> None:
    """Run one child to its end and exit with its status; report the reason to the parent when it is not FINE.

    `gpu` is where it computes, if at all on GPUs: 0 is the first one, -1 the last one.
    """
    pipes = take_pipes()
    try:
        trio.run(_child_main, serve, pipes, gpu)
        status = FINE
    except BaseException as error:  # whatever it is, the parent gets a report
        traceback.print_exc()
        causes = list(_leaves(error))
        status = _status(causes)
        reason = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        os.write(pipes.outgoing, msgspec.json.encode(PairFailed(reason, status)) + b"\n")
    sys.exit(status)


async def _child_main(serve: Serve, pipes: ParentPipes, gpu: int) -> None:
    parent = pipes.channel(ToChild)
    start = await parent.receive()
    if start is None:
        return
    if not isinstance(start, Start):
        raise af.LocalProtocolError(f"expected Start, got {start!r}")
    sender, orders = trio.open_memory_channel[ToChild](8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read_orders, parent, sender, nursery.cancel_scope)
        await run_node(serve, start, parent, orders, gpu=gpu)
        nursery.cancel_scope.cancel()


async def _read_orders(parent: LineChannel, sender: trio.MemorySendChannel[ToChild], scope: trio.CancelScope) -> None:
    """Pass the parent's orders on; when it is gone without a Finish, end everything."""
    async with sender:
        while (order := await parent.receive()) is not None:
            await sender.send(order)
            if isinstance(order, Finish):
                return
    scope.cancel()


async def run_node(
    serve: Serve,
    start: Start,
    parent: LineChannel,
    orders: trio.MemoryReceiveChannel[ToChild],
    engine_factory: Callable[[af.FabricConfig], Any] | None = None,
    *,
    gpu: int = 0,
) -> None:
    """Load the model, open fabric and pool, meet the peer, serve, close both, send goodbye.

    Cancellation: a forward pass ends at its next layer or token; then the fabric drains and closes.
    """
    settings = start.settings
    device = _device(settings, gpu)
    loaded = await trio.to_thread.run_sync(load_model, settings, device)
    layout = loaded.layout
    count = SPARE * layout.pages_for(settings.pool_tokens)
    # One rail: there is nothing to fall back to. Long deadlines: two models may keep all cores of a small machine busy,
    # and the parent notices the death of a child at once.
    rail = settings.provider if device == "cpu" else device
    config = af.FabricConfig(rails=(rail,), connect_deadline=30.0, peer_deadline_host=10.0, secret=start.secret)
    async with af.open_fabric(config, engine_factory=engine_factory) as fabric:
        # Shuffled, so that two nodes never agree on pages by luck, and batches are really scattered.
        seed = fabric.address.incarnation
        async with open_pool(fabric, layout, pages=count, contexts=1, device=device, seed=seed) as pool:
            pages = pool.tensor()
            await trio.to_thread.run_sync(_warm_up, loaded, pages, settings)
            rails = [f"{rail.provider} {rail.device}".strip() for rail in fabric.rails]
            await parent.send(PairHello(bytes(fabric.address), rails, loaded.name, count, layout))
            meet = await orders.receive()
            if not isinstance(meet, Meet):
                raise af.LocalProtocolError(f"expected Meet, got {meet!r}")
            peer = af.FabricAddress.from_bytes(meet.address)
            await fabric.connect(peer)
            await serve(PairNode(settings, parent, orders, loaded, pool, pages, peer, meet.layout))
            report = pool.report()
    await parent.send(PairGoodbye(report.held + report.quarantined))


def poison(pages: torch.Tensor, table: Sequence[int]) -> None:
    """Fill pages with NaN, so that only what arrives afterwards can be right; waits for their GPU."""
    pages[:, torch.tensor(list(table), dtype=torch.int64)] = float("nan")
    if pages.is_cuda:
        torch.cuda.synchronize(pages.device)


def _warm_up(loaded: PairModel, pages: torch.Tensor, settings: DemoSettings) -> None:
    """Touch all pages and run a short prompt, so that the first real one does not pay for first use."""
    poison(pages, range(pages.shape[1]))
    tokens = min(2 * settings.page_tokens, loaded.inner.max_tokens)
    table = range(loaded.layout.pages_for(tokens))
    prefill(loaded.model, [1] * tokens, PairPagedCache(pages, table), settings.chunk)
    poison(pages, table)


def _device(settings: DemoSettings, gpu: int) -> str:
    """Return where torch computes and where pages lie: cpu, or cuda:N."""
    if settings.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise af.DeviceError("torch sees no GPU", remedy="install torch with CUDA; see asyncfabric doctor")
    return f"cuda:{gpu % torch.cuda.device_count()}"


def _status(causes: list[BaseException]) -> int:
    if all(isinstance(cause, af.DeviceError | ImportError) for cause in causes):
        return UNFIT
    if any(isinstance(cause, TimeoutError) for cause in causes):
        return DEADLINE
    return CHECK_FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
