"""What both children are made of: the parent's orders, the model, a fabric with its paged memory, the one peer.

A trio program on the public API of asyncfabric. The forward passes run on a worker thread and look at `stop`; nothing
else here runs outside the event loop.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import trio

import asyncfabric as af
from asyncfabric_services.children.line_channel import LineChannel
from asyncfabric_services.children.worker import ParentPipes, take_pipes
from asyncfabric_services.demo.pair.generation import prefill
from asyncfabric_services.demo.pair.model import PairModel, load_model
from asyncfabric_services.demo.pair.page_pool import PagePool, pool_bytes
from asyncfabric_services.demo.pair.paged_cache import PagedCache
from asyncfabric_services.demo.pair.protocol import (
    Failed,
    Finish,
    Goodbye,
    Hello,
    Lease,
    Meet,
    Refusal,
    Start,
    ToChild,
    fragments,
)
from asyncfabric_services.demo.settings import Settings
from asyncfabric_services.exits import CHECK_FAILED, DEADLINE, FINE, UNFIT

SPARE = 2  # the pool has this many times the pages that the longest prompt needs, so that leases are scattered


class LostError(Exception):
    """The deadline passed before everything had arrived."""


class Stopped(Exception):
    """The parent went away or the request failed: the forward pass on the worker thread ends here."""


@dataclass
class Node:
    """One child, ready to serve."""

    settings: Settings
    parent: LineChannel
    orders: trio.MemoryReceiveChannel[ToChild]
    loaded: PairModel
    fabric: af.Fabric
    peer: af.Peer
    pool: PagePool
    pages_region: af.Region
    context_region: af.Region
    context: torch.Tensor
    stop: threading.Event
    abort: threading.Event = field(default_factory=threading.Event)
    _keys: dict[bytes, af.RegionKey] = field(default_factory=dict)

    def check(self, *_: object) -> None:
        """Raise Stopped on the worker thread when there is nothing left to compute for."""
        if self.stop.is_set() or self.abort.is_set():
            raise Stopped

    def key_of(self, data: bytes) -> af.RegionKey:
        """Return the key of these bytes: the same object each time, so that the peer's memory is mapped once."""
        if data not in self._keys:
            self._keys[data] = af.RegionKey.from_bytes(data)
        return self._keys[data]

    def settle(self) -> None:
        """Wait for the GPU: what was filled must be filled before others may write there."""
        if self.context.is_cuda:
            torch.cuda.synchronize(self.context.device)

    async def tell_peer(self, message: Lease | Refusal) -> None:
        """Send a message of any length to the other child.

        Cancellation: part of the message may have left; the peer never completes it.
        """
        for payload in fragments(message):
            await self.fabric.send(self.peer, payload)


Serve = Callable[[Node], Awaitable[None]]


def run_child(serve: Serve, *, gpu: int = 0) -> None:
    """Run one child to its end and exit with its status; tell the parent the reason when it is not FINE.

    `gpu` is where it computes, if at all on GPUs: 0 is the first one, -1 the last one.
    """
    pipes = take_pipes()
    try:
        trio.run(_child_main, serve, pipes, gpu)
        status = FINE
    except BaseException as error:  # whatever it is, the parent must hear of it
        traceback.print_exc()
        causes = list(_leaves(error))
        status = _status(causes)
        reason = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        os.write(pipes.outgoing, msgspec.json.encode(Failed(reason, status)) + b"\n")
    sys.exit(status)


async def _child_main(serve: Serve, pipes: ParentPipes, gpu: int) -> None:
    parent = pipes.channel(ToChild)
    start = await parent.receive()
    if start is None:
        return
    if not isinstance(start, Start):
        raise af.LocalProtocolError(f"expected Start, got {start!r}")
    stop = threading.Event()
    sender, orders = trio.open_memory_channel[ToChild](8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read_orders, parent, sender, stop, nursery.cancel_scope)
        await run_node(serve, start.settings, parent, orders, stop, gpu=gpu)
        nursery.cancel_scope.cancel()


async def _read_orders(
    parent: LineChannel, sender: trio.MemorySendChannel[ToChild], stop: threading.Event, scope: trio.CancelScope
) -> None:
    """Pass the parent's orders on; when it is gone without a Finish, end everything."""
    async with sender:
        while (order := await parent.receive()) is not None:
            await sender.send(order)
            if isinstance(order, Finish):
                return
    stop.set()
    scope.cancel()


async def run_node(
    serve: Serve,
    settings: Settings,
    parent: LineChannel,
    orders: trio.MemoryReceiveChannel[ToChild],
    stop: threading.Event,
    engine_factory: Callable[[af.FabricConfig], Any] | None = None,
    *,
    gpu: int = 0,
) -> None:
    """Load the model, open the fabric, meet the peer, serve, close the fabric, say goodbye.

    Cancellation: what `serve` does with it; then the fabric drains and closes.
    """
    device = _device(settings, gpu)
    loaded = await trio.to_thread.run_sync(load_model, settings, device)
    layout = loaded.layout
    count = SPARE * layout.pages_for(settings.pool_tokens)
    # One rail: there is nothing to fall back to. Long deadlines: two models may keep all cores of a small machine busy,
    # and the parent notices the death of a child at once.
    rail = settings.provider if device == "cpu" else device
    config = af.FabricConfig(rails=(rail,), connect_deadline=30.0, peer_deadline_host=10.0)
    async with af.open_fabric(config, engine_factory=engine_factory) as fabric:
        pages_region = await fabric.allocate(pool_bytes(layout, count), device=device)
        context_region = await fabric.allocate(layout.vocabulary * 4, device=device)
        context = context_region.tensor(torch.float32, layout.vocabulary)
        pool = PagePool(layout, count, pages_region.tensor(torch.uint8), fabric.address.incarnation)
        await trio.to_thread.run_sync(_warm_up, loaded, pool, settings)
        rails = [f"{rail.provider} {rail.device}".strip() for rail in fabric.rails]
        address = bytes(fabric.address)
        await parent.send(Hello(address, rails, loaded.name, count, layout.page_bytes))
        meet = await orders.receive()
        if not isinstance(meet, Meet):
            raise af.LocalProtocolError(f"expected Meet, got {meet!r}")
        peer = await fabric.connect(meet.address)
        await serve(
            Node(settings, parent, orders, loaded, fabric, peer, pool, pages_region, context_region, context, stop)
        )
    await parent.send(Goodbye(pool.leased))


def _warm_up(loaded: PairModel, pool: PagePool, settings: Settings) -> None:
    """Touch all pages and run a short prompt, so that the first real one does not pay for first use."""
    pool.poison(list(range(pool.pages)))
    tokens = min(2 * settings.page_tokens, loaded.inner.max_tokens)
    pages = pool.lease(pool.layout.pages_for(tokens))
    prefill(loaded.model, [1] * tokens, PagedCache(pool, pages), settings.chunk)
    pool.release(pages)


def _device(settings: Settings, gpu: int) -> str:
    """Return where torch computes and where pages lie: cpu, or cuda:N."""
    if settings.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise af.DeviceError("torch sees no GPU", remedy="install torch with CUDA; see asyncfabric doctor")
    return f"cuda:{gpu % torch.cuda.device_count()}"


def _status(causes: list[BaseException]) -> int:
    if all(isinstance(cause, af.DeviceError | ImportError) for cause in causes):
        return UNFIT
    if any(isinstance(cause, LostError) for cause in causes):
        return DEADLINE
    return CHECK_FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
