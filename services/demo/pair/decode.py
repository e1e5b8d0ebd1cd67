"""The decode process: leases pages, waits for the count, decodes in place, and checks itself against one process.

Decode goes first: without a lease there is no prefill. What to wait for follows from the layouts alone.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
import trio
from transformers.cache_utils import DynamicCache

from asyncfabric.kv import KvInbox, KvLease, deliver, open_inbox, open_kv_channel
from asyncfabric_services.demo.pair.generation import decode, prefill
from asyncfabric_services.demo.pair.node import PairNode, poison, run_child
from asyncfabric_services.demo.pair.paged_cache import PairPagedCache
from asyncfabric_services.demo.pair.protocol import Finish, PairAnswer, PairProgress, encode_prompt
from asyncfabric_services.demo.pair.verdict import Continuation, compare
from asyncfabric_services.demo.settings import Job

PROGRESS_SECONDS = 0.05


async def serve(node: PairNode) -> None:
    """Answer the parent's jobs one by one until it sends Finish.

    Cancellation: a forward pass in progress stops at its next token; pages that may still be written are not reused.
    """
    fabric = node.pool.fabric
    async with (
        open_kv_channel(fabric) as channel,
        open_inbox(fabric, node.pool, channel) as inbox,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(deliver, channel, [inbox])
        async for order in node.orders:
            if isinstance(order, Finish):
                break
            if isinstance(order, Job):
                await _answer(node, inbox, order)
        nursery.cancel_scope.cancel()


async def _answer(node: PairNode, inbox: KvInbox, job: Job) -> None:
    count = node.settings.new_tokens
    prompt = node.loaded.inner.tokenizer.encode(job.text)
    prompt = prompt[: job.tokens] if job.tokens else prompt
    longest = node.loaded.inner.max_tokens
    if len(prompt) + count > longest:
        raise ValueError(f"prompt {job.id}: {len(prompt)} + {count} tokens exceed the model's {longest}")
    deadline = trio.current_time() + node.settings.deadline
    tokens = len(prompt) + count - 1
    async with await node.pool.lease(f"prompt {job.id}", tokens=tokens, context=True, deadline=deadline) as lease:
        await _answer_in(node, inbox, job, prompt, lease)


async def _answer_in(node: PairNode, inbox: KvInbox, job: Job, prompt: list[int], lease: KvLease) -> None:
    count, table = node.settings.new_tokens, lease.pages.tolist()
    context = np.frombuffer(lease.context.memory, np.float32)
    context[:] = np.nan
    poison(node.pages, table)
    begin = time.monotonic()
    async with (
        inbox.request(
            lease, [node.peer], node.peer_layout, len(prompt), body=encode_prompt(prompt), names=["prefill"]
        ) as request,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_show_arrivals, node, job, lease)
        await request.wait()
        nursery.cancel_scope.cancel()
    last_arrival = time.monotonic_ns()
    logits = torch.from_numpy(context.copy())
    int(logits.argmax())  # the first token
    ttft = time.monotonic() - begin
    # From here on nobody writes to the pages but us. Had the wait failed they would be fenced before they are reused.
    progress = _Progress(node, job.id)
    begin = time.monotonic()
    cache = PairPagedCache(node.pages, table, length=len(prompt))
    continuation = partial(decode, node.loaded.model, cache, logits, count, progress.stage("decode", count))
    streamed = await trio.to_thread.run_sync(continuation)
    step = (time.monotonic() - begin) / max(1, count - 1)
    reference, reference_cache, reference_ttft = await trio.to_thread.run_sync(_one_process, node, prompt, progress)
    verdict = compare(streamed, reference, pages_equal=_same_cache(cache, reference_cache))
    await node.parent.send(
        PairAnswer(
            id=job.id,
            prompt_tokens=len(prompt),
            arrivals=lease.arrived,
            last_arrival_ns=last_arrival,
            ttft_streamed=ttft,
            ttft_one_process=reference_ttft,
            step_seconds=step,
            text=node.loaded.text_of(streamed.tokens),
            differences=list(verdict.differences),
        )
    )


async def _show_arrivals(node: PairNode, job: Job, lease: KvLease) -> None:
    while True:
        await node.parent.send(PairProgress(job.id, "pages", lease.arrived, lease.expected))
        await trio.sleep(PROGRESS_SECONDS)


class _Progress:
    """Reports to the parent how many tokens a worker thread has decoded, a few times a second."""

    def __init__(self, node: PairNode, job: int) -> None:
        self._node = node
        self._job = job
        self._shown = 0.0

    def stage(self, name: str, total: int) -> Any:
        """Return the `on_token` of one stage, which also ends the thread's work when the node is cancelled."""

        def on_token(done: int) -> None:
            trio.from_thread.check_cancelled()
            now = time.monotonic()
            if now - self._shown >= PROGRESS_SECONDS:
                self._shown = now
                trio.from_thread.run(self._node.parent.send, PairProgress(self._job, name, done, total))

        return on_token


def _one_process(node: PairNode, prompt: list[int], progress: _Progress) -> tuple[Continuation, DynamicCache, float]:
    """Run the same prompt with the cache of transformers, in this process alone."""
    model, count = node.loaded.model, node.settings.new_tokens
    begin = time.monotonic()
    cache = DynamicCache(config=model.config)
    logits = prefill(model, prompt, cache, node.settings.chunk)
    int(logits.argmax())
    ttft = time.monotonic() - begin
    return decode(model, cache, logits, count, progress.stage("reference", count)), cache, ttft


def _same_cache(paged: PairPagedCache, reference: DynamicCache) -> bool:
    """Return whether the pages hold, bit for bit, what the reference's cache holds."""
    their_layers: list[Any] = list(reference.layers)
    for ours, theirs in zip(paged.paged_layers, their_layers, strict=True):
        keys, values = ours.gather(ours.length)
        if not (torch.equal(keys, theirs.keys) and torch.equal(values, theirs.values)):
            return False
    return True


if __name__ == "__main__":
    run_child(serve, gpu=-1)
