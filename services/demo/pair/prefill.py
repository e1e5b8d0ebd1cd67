"""The prefill process: computes prompts, pushing each layer's pages to the leaseholder while the next is computed.

On CPUs the forward pass runs on a worker thread, which hands each layer to the event loop and does not wait for it. On
a GPU the writes wait for a watch word that kernels count up (gpu_prefill.py).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import trio

import asyncfabric as af
from asyncfabric.kv import KvJob, KvStream, deliver, open_kv_channel, open_outbox
from asyncfabric_services.demo.pair.generation import prefill
from asyncfabric_services.demo.pair.node import PairNode, run_child
from asyncfabric_services.demo.pair.paged_cache import PairPagedCache
from asyncfabric_services.demo.pair.protocol import Pushed, decode_prompt
from asyncfabric_services.runner.runner import chunks

if TYPE_CHECKING:
    from asyncfabric_services.demo.pair.gpu_prefill import GpuPrefill


async def serve(node: PairNode) -> None:
    """Serve the offers of the one peer until the parent sends Finish.

    Cancellation: a request in progress stops at its next layer and drains its transfers.
    """
    fabric = node.pool.fabric
    async with (
        fabric.watch() as word,
        open_kv_channel(fabric) as channel,
        open_outbox(fabric, node.pool, channel, PairPrefill(node, word).serve) as outbox,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(deliver, channel, [outbox])
        await node.orders.receive()
        nursery.cancel_scope.cancel()


class PairPrefill:
    """Computes the prompts of offers and streams their pages."""

    def __init__(self, node: PairNode, word: af.WatchWord) -> None:
        """Compute on the device of the node's pages; there `word` counts layers if that is a GPU."""
        self._node = node
        self._word = word
        self._gpu: GpuPrefill | None = None
        if node.pages.is_cuda:
            from asyncfabric_services.demo.pair.gpu_prefill import GpuPrefill

            self._gpu = GpuPrefill(node.loaded.model, node.pages, word)

    async def serve(self, job: KvJob) -> None:
        """Serve one offer and report its figures to the parent; raises ValueError for one of another peer.

        Cancellation: the forward pass ends at its next layer; the stream drains before its pages are free.
        """
        node, tokens = self._node, job.offer.tokens
        if job.offer.target != node.peer.incarnation:
            raise ValueError("only the peer that the parent named may ask")
        prompt = decode_prompt(job.offer.body, tokens)
        async with (
            await node.pool.lease("prefill", tokens=tokens, context=True) as lease,
            job.open_stream(lease.pages) as stream,
        ):
            start_ns = time.monotonic_ns()
            compute = self._compute if self._gpu is None else partial(self._compute_on_gpu, self._gpu)
            logits = await compute(prompt, lease.pages.tolist(), stream)
            end_ns = time.monotonic_ns()
            lease.context.memory[:] = logits.numpy().tobytes()
            await stream.finish(lease.context)
        await node.parent.send(Pushed(job.offer.lease, stream.bytes, stream.pieces, start_ns, end_ns, stream.writes))

    async def _compute(self, prompt: list[int], table: list[int], stream: KvStream) -> torch.Tensor:
        loop = trio.lowlevel.current_trio_token()
        failures: list[Exception] = []

        def push(layer: int, tokens_ready: int) -> None:
            try:
                stream.push(layer, tokens_ready)
            except Exception as error:  # raised in the job: here it would end the event loop
                failures.append(error)

        def on_written(layer: int, _start: int, end: int) -> None:
            """Runs on the compute thread, inside the model's forward."""
            trio.from_thread.check_cancelled()
            if failures:
                raise failures[0]
            loop.run_sync_soon(push, layer, end)

        cache = PairPagedCache(self._node.pages, table, on_written=on_written)
        run = partial(prefill, self._node.loaded.model, prompt, cache, self._node.settings.chunk)
        logits = await trio.to_thread.run_sync(run)
        if failures:
            raise failures[0]
        return logits

    async def _compute_on_gpu(
        self, gpu: GpuPrefill, prompt: list[int], table: list[int], stream: KvStream
    ) -> torch.Tensor:
        parts = list(chunks(len(prompt), self._node.settings.chunk or len(prompt)))
        logits = torch.empty(0)
        for start, end in parts:
            await trio.to_thread.run_sync(gpu.prepare, start, end)
        for start, end in parts:
            layers_before = self._word.value
            for layer in range(stream.layout.layers):
                stream.push(layer, end, after=self._word.reaches(layers_before + layer + 1))
            logits = await trio.to_thread.run_sync(gpu.run, prompt[start:end], start, table)
        return logits


if __name__ == "__main__":
    run_child(serve)
