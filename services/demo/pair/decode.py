"""The decode process: leases pages, waits for the count, decodes in place, and checks itself against one process.

Decode goes first: without a lease there is no prefill. It works out from the layout alone how many arrivals to
wait for.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import torch
import trio
from transformers.cache_utils import DynamicCache

import asyncfabric as af
from asyncfabric_services.demo.pair.generation import decode, prefill
from asyncfabric_services.demo.pair.node import LostError, Node, run_child
from asyncfabric_services.demo.pair.paged_cache import PagedCache
from asyncfabric_services.demo.pair.protocol import Answer, Assembler, Finish, Lease, Progress, Refusal
from asyncfabric_services.demo.pair.verdict import Continuation, compare
from asyncfabric_services.demo.settings import Job

PROGRESS_SECONDS = 0.05


class RefusedError(Exception):
    """Prefill refused the lease."""


async def serve(node: Node) -> None:
    """Answer the parent's jobs one by one until it says Finish.

    Cancellation: a forward pass in progress stops at its next token; pages that may still be written stay leased.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_refusals, node)
        async for order in node.orders:
            if isinstance(order, Finish):
                break
            if isinstance(order, Job):
                await _answer(node, order)
        nursery.cancel_scope.cancel()


async def _watch_refusals(node: Node) -> None:
    assembler = Assembler()
    async for message in node.fabric.messages():
        if message.peer.incarnation == node.peer.incarnation:
            reply = assembler.add(message.payload)
            if isinstance(reply, Refusal):
                raise RefusedError(f"prefill refuses prompt {reply.id}: {reply.reason}")


async def _answer(node: Node, job: Job) -> None:
    layout, count = node.loaded.layout, node.settings.new_tokens
    prompt = node.loaded.inner.tokenizer.encode(job.text)
    prompt = prompt[: job.tokens] if job.tokens else prompt
    longest = node.loaded.inner.max_tokens
    if len(prompt) + count > longest:
        raise ValueError(f"prompt {job.id}: {len(prompt)} + {count} tokens exceed the model's {longest}")
    pages = node.pool.lease(layout.pages_for(len(prompt) + count - 1))
    node.pool.poison(pages)
    node.context.fill_(float("nan"))
    node.settle()
    with node.fabric.counter() as counter:
        begin = time.monotonic()
        await node.tell_peer(_lease(node, job, prompt, pages, counter.imm))
        await _wait_arrivals(node, job, counter, layout.expected_arrivals(len(prompt)))
        last_arrival = time.monotonic_ns()
        logits = node.context.cpu().clone()
        int(logits.argmax())  # the first token
        ttft = time.monotonic() - begin
        arrivals = counter.value
    # From here on nobody writes to the pages but us. Had the wait failed they would stay leased, never reused.
    progress = _Progress(node, job.id)
    begin = time.monotonic()
    cache = PagedCache(node.pool, pages, length=len(prompt))
    continuation = partial(decode, node.loaded.model, cache, logits, count, progress.stage("decode", count))
    streamed = await trio.to_thread.run_sync(continuation)
    step = (time.monotonic() - begin) / max(1, count - 1)
    reference, reference_cache, reference_ttft = await trio.to_thread.run_sync(_one_process, node, prompt, progress)
    verdict = compare(streamed, reference, pages_equal=_same_cache(cache, reference_cache))
    node.pool.release(pages)
    await node.parent.send(
        Answer(
            id=job.id,
            prompt_tokens=len(prompt),
            arrivals=arrivals,
            last_arrival_ns=last_arrival,
            ttft_streamed=ttft,
            ttft_one_process=reference_ttft,
            step_seconds=step,
            text=node.loaded.text_of(streamed.tokens),
            differences=list(verdict.differences),
        )
    )


def _lease(node: Node, job: Job, prompt: list[int], pages: list[int], imm: int) -> Lease:
    layout = node.loaded.layout
    return Lease(
        id=job.id,
        prompt=prompt,
        pages=pages[: layout.pages_for(len(prompt))],
        pool_pages=node.pool.pages,
        pages_key=bytes(node.pages_region.key(access="write")),
        context_key=bytes(node.context_region.key(access="write")),
        imm=imm,
        layout=msgspec.json.encode(layout),
        layout_digest=layout.digest(),
        deadline=node.settings.deadline,
    )


async def _wait_arrivals(node: Node, job: Job, counter: af.ImmCounter, expected: int) -> None:
    async def show() -> None:
        async for value in counter:
            await node.parent.send(Progress(job.id, "pages", value, expected))
            await trio.sleep(PROGRESS_SECONDS)

    with trio.move_on_after(node.settings.deadline) as deadline:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(show)
            await counter.wait(expected, peers=[node.peer])
            nursery.cancel_scope.cancel()
    if deadline.cancelled_caught:
        raise LostError(f"prompt {job.id}: {counter.value} of {expected} arrivals after {node.settings.deadline:g} s")


class _Progress:
    """Tells the parent how many tokens a worker thread has decoded, a few times a second."""

    def __init__(self, node: Node, job: int) -> None:
        self._node = node
        self._job = job
        self._shown = 0.0

    def stage(self, name: str, total: int) -> Any:
        """Return the `on_token` of one stage, which also ends the thread's work when the parent is gone."""

        def on_token(done: int) -> None:
            self._node.check()
            now = time.monotonic()
            if now - self._shown >= PROGRESS_SECONDS:
                self._shown = now
                trio.from_thread.run(self._node.parent.send, Progress(self._job, name, done, total))

        return on_token


def _one_process(node: Node, prompt: list[int], progress: _Progress) -> tuple[Continuation, DynamicCache, float]:
    """Run the same prompt with the cache of transformers, in this process alone."""
    model, count = node.loaded.model, node.settings.new_tokens
    begin = time.monotonic()
    cache = DynamicCache(config=model.config)
    logits = prefill(model, prompt, cache, node.settings.chunk)
    int(logits.argmax())
    ttft = time.monotonic() - begin
    return decode(model, cache, logits, count, progress.stage("reference", count)), cache, ttft


def _same_cache(paged: PagedCache, reference: DynamicCache) -> bool:
    """Return whether the pages hold, bit for bit, what the reference's cache holds."""
    their_layers: list[Any] = list(reference.layers)
    for ours, theirs in zip(paged.paged_layers, their_layers, strict=True):
        keys, values = ours.gather(ours.length)
        if not (torch.equal(keys, theirs.keys) and torch.equal(values, theirs.values)):
            return False
    return True


if __name__ == "__main__":
    run_child(serve, gpu=-1)
