"""The prefill process: computes prompts, pushing each layer's pages to the leaseholder while the next is computed.

On CPUs the forward pass runs on a worker thread; its cache tells the event loop of each layer through the trio token,
which never blocks the computation. On a GPU a watch word tells the engine (gpu_prefill.py).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

import asyncfabric as af
from asyncfabric_services.demo.pair.generation import prefill
from asyncfabric_services.demo.pair.kv_stream import KvStream
from asyncfabric_services.demo.pair.layout import KvLayout
from asyncfabric_services.demo.pair.node import Node, run_child
from asyncfabric_services.demo.pair.paged_cache import PagedCache
from asyncfabric_services.demo.pair.protocol import Assembler, Lease, Pushed, Refusal
from asyncfabric_services.runner.runner import chunks

if TYPE_CHECKING:
    from asyncfabric_services.demo.pair.gpu_prefill import GpuPrefill

LayerEvent = tuple[int, int, int]  # layer, first token, end token


async def serve(node: Node) -> None:
    """Serve leases of the one peer until the parent says Finish.

    Cancellation: a request in progress stops at its next layer and drains its transfers.
    """
    async with node.fabric.watch() as word, trio.open_nursery() as nursery:
        gpu = None
        if node.settings.device == "cuda":
            from asyncfabric_services.demo.pair.gpu_prefill import GpuPrefill

            gpu = GpuPrefill(node.loaded.model, node.pool, word)
        nursery.start_soon(_take_leases, node, word, gpu)
        await node.orders.receive()
        nursery.cancel_scope.cancel()


async def _take_leases(node: Node, word: af.WatchWord, gpu: GpuPrefill | None) -> None:
    assembler = Assembler()
    async for message in node.fabric.messages():
        if message.peer.incarnation != node.peer.incarnation:
            continue  # only the peer that the parent named may ask
        lease = assembler.add(message.payload)
        if isinstance(lease, Lease):
            reason = refusal(node.loaded.layout, lease)
            if reason is not None:
                await node.tell_peer(Refusal(lease.id, reason))
            elif gpu is not None:
                await _stream_from_gpu(node, lease, word, gpu)
            else:
                await _stream(node, lease)


def refusal(layout: KvLayout, lease: Lease) -> str | None:
    """Say why pages of this node cannot go where the lease says; None when they can."""
    if lease.layout_digest != layout.digest():
        theirs = msgspec.json.decode(lease.layout, type=KvLayout)
        return f"layouts differ in {layout.difference(theirs) or 'their digest'}"
    if len(lease.pages) != layout.pages_for(len(lease.prompt)):
        return f"{len(lease.pages)} pages leased for {len(lease.prompt)} tokens of {layout.page_tokens} per page"
    return None


async def _stream(node: Node, lease: Lease) -> None:
    layout, total = node.loaded.layout, len(lease.prompt)
    source = node.pool.lease(len(lease.pages))
    stream = KvStream(node, source, lease)
    events_in, events = trio.open_memory_channel[LayerEvent](layout.layers * (total + 1))
    loop = trio.lowlevel.current_trio_token()
    node.abort.clear()

    def on_written(layer: int, start: int, end: int) -> None:
        """Runs on the compute thread, inside the model's forward."""
        node.check()
        loop.run_sync_soon(events_in.send_nowait, (layer, start, end))

    compute_start = compute_end = time.monotonic_ns()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_push_layers, node, stream, events, total)
            cache = PagedCache(node.pool, source, on_written=on_written)
            compute = partial(prefill, node.loaded.model, lease.prompt, cache, node.settings.chunk)
            try:
                logits = await trio.to_thread.run_sync(compute)
                compute_end = time.monotonic_ns()
            finally:
                events_in.close()
        node.context.copy_(logits)
        await stream.push_context()
    finally:
        spans = await stream.drain()  # nothing below may touch the pages before this has returned
        node.pool.release(source)
    await node.parent.send(Pushed(lease.id, stream.bytes, stream.pages, compute_start, compute_end, spans))


async def _stream_from_gpu(node: Node, lease: Lease, word: af.WatchWord, gpu: GpuPrefill) -> None:
    layout, total = node.loaded.layout, len(lease.prompt)
    source = node.pool.lease(len(lease.pages))
    stream = KvStream(node, source, lease)
    parts = list(chunks(total, node.settings.chunk or total))
    spans: list[tuple[int, int]] = []
    try:
        for start, end in parts:
            await trio.to_thread.run_sync(gpu.prepare, start, end)
        compute_start = time.monotonic_ns()
        for start, end in parts:
            layers_before = word.value
            for layer in range(layout.layers):
                moment = word.reaches(layers_before + layer + 1)
                await stream.push_layer(layer, layout.pages_to_push(start, end, total), after=moment)
            logits = await trio.to_thread.run_sync(gpu.run, lease.prompt[start:end], start, source)
        compute_end = time.monotonic_ns()
        node.context.copy_(logits)
        node.settle()
        await stream.push_context()
        spans = await stream.drain()
    finally:
        stream.cancel()  # nothing, unless the word will never come to where a write waits for it
        await stream.drain()
        node.pool.release(source)
    # A write was submitted before its layer was computed: how long it took beside the computation is not in its span.
    spans = [(max(submitted, compute_start), completed) for submitted, completed in spans]
    await node.parent.send(Pushed(lease.id, stream.bytes, stream.pages, compute_start, compute_end, spans))


async def _push_layers(node: Node, stream: KvStream, events: trio.MemoryReceiveChannel[LayerEvent], total: int) -> None:
    try:
        async for layer, start, end in events:
            await stream.push_layer(layer, node.loaded.layout.pages_to_push(start, end, total))
    except BaseException:
        node.abort.set()  # the thread cannot be cancelled; it looks at this before it reports its next layer
        raise


if __name__ == "__main__":
    run_child(serve)
