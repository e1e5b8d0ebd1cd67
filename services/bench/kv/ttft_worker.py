"""A measured process with a model: a prefill node, or a decode node that is asked for first tokens. No router, no HTTP.

What runs is what `asyncfabric serve prefill` and `decode` run. The node lives in a task beside the calls, since it has
tasks of its own.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import torch
import trio
from prometheus_client import CollectorRegistry

from asyncfabric.bench.pattern import random_bytes
from asyncfabric.kv import KvInbox, KvLayout, KvLease, deliver, open_inbox, open_kv_channel, open_outbox
from asyncfabric_services.bench.worker import BenchWorker
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.nodes.filling import fill
from asyncfabric_services.nodes.messages import PrefillSource
from asyncfabric_services.nodes.paged_model import PagedModel, open_paged_model
from asyncfabric_services.nodes.prefiller import Prefiller, StreamMeter
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.runner.batch import TokenSpan
from asyncfabric_services.runner.runner import chunks
from asyncfabric_services.settings.sources import load_settings

STEPS = 5


class TtftWorker(BenchWorker):
    """One node; opened by `do_serve`."""

    _model: PagedModel
    _inbox: KvInbox
    _source: PrefillSource
    _chunk_tokens: int

    def __init__(self, meeting: int = -1) -> None:
        """Open nothing yet."""
        super().__init__(meeting)
        self._wanted: trio.MemorySendChannel[Stage]
        self._wanted, self._orders = trio.open_memory_channel[Stage](1)
        self._opened = trio.Event()
        self._failure: Exception | None = None

    async def beside(self) -> None:
        """Keep the node open until the process ends."""
        stage = await self._orders.receive()
        try:
            async with self._node(stage):
                self._opened.set()
                await trio.sleep_forever()
        except Exception as error:
            self._failure = error
            self._opened.set()

    def _node(self, stage: Stage) -> AbstractAsyncContextManager[None]:
        return self._decode_node(stage) if stage.condition.role == "decode" else self._prefill_node(stage)

    @asynccontextmanager
    async def _prefill_node(self, stage: Stage) -> AsyncIterator[None]:
        async with (
            open_paged_model(stage) as self._model,
            open_kv_channel(self._model.fabric) as channel,
            trio.open_nursery() as nursery,
        ):
            prefiller = Prefiller(
                self._model, stage.admission, stage.spans, self._chunk_tokens, StreamMeter(stage.registry)
            )
            async with open_outbox(self._model.fabric, self._model.pool, channel, prefiller.serve) as outbox:
                nursery.start_soon(deliver, channel, [outbox])
                yield

    @asynccontextmanager
    async def _decode_node(self, stage: Stage) -> AsyncIterator[None]:
        async with (
            open_paged_model(stage) as self._model,
            open_kv_channel(self._model.fabric) as channel,
            trio.open_nursery() as nursery,
            open_inbox(self._model.fabric, self._model.pool, channel) as self._inbox,
        ):
            nursery.start_soon(deliver, channel, [self._inbox])
            yield

    async def do_serve(self, role: str, settings: dict[str, str]) -> dict[str, Any]:
        """Open the node with these settings; return where it is and how its pages lie."""
        chosen = load_settings(flags=settings).settings
        condition = Condition(role, role, "ready")
        self._chunk_tokens = chosen.batch.chunk_tokens
        await self._wanted.send(Stage(chosen, condition, CollectorRegistry(), RequestAdmission(condition, 8)))
        await self._opened.wait()
        if self._failure is not None:
            raise self._failure
        rail, layout = self._model.fabric.rails[0], self._model.pool.layout
        return {
            "address": bytes(self._model.fabric.address).hex(),
            "layout": msgspec.to_builtins(layout),
            "page_bytes": layout.page_bytes,
            "library": rail.library,
            "version": rail.version,
        }

    async def do_source(self, address: str, layout: dict[str, Any]) -> None:
        """Take the prefill node to ask."""
        self._source = PrefillSource("prefill", bytes.fromhex(address), msgspec.convert(layout, KvLayout))

    async def do_streamed(self, tokens: int, seed: int) -> dict[str, Any]:
        """Have a prompt computed by the prefill node; see `_first_token`."""

        async def first(prompt: list[int], lease: KvLease) -> torch.Tensor:
            return await fill(self._inbox, lease, self._source, prompt)

        return await self._first_token(tokens, seed, first)

    async def do_alone(self, tokens: int, seed: int) -> dict[str, Any]:
        """Compute a prompt in this process; see `_first_token`."""

        async def first(prompt: list[int], lease: KvLease) -> torch.Tensor:
            logits = torch.empty(0)
            for start, end in chunks(len(prompt), self._chunk_tokens):
                logits = await self._pass(prompt[start:end], start, lease)
            return logits

        return await self._first_token(tokens, seed, first)

    async def _first_token(self, tokens: int, seed: int, first: Any) -> dict[str, Any]:
        """Return the seconds to the first token and of one step of decoding, and a digest of the logits of both."""
        prompt = [int(token) for token in random_bytes(tokens, seed)]
        started = time.monotonic_ns()
        async with await self._model.pool.lease("bench", tokens=tokens + 1, context=True) as lease:
            logits = await first(prompt, lease)
            token = int(logits.numpy().argmax())
            seconds = (time.monotonic_ns() - started) / 1e9
            digest, steps = hashlib.sha256(logits.numpy().tobytes()), list[float]()
            for _ in range(STEPS):
                began = time.monotonic_ns()
                after = await self._pass([token], tokens, lease)
                steps.append((time.monotonic_ns() - began) / 1e9)
            digest.update(after.numpy().tobytes())  # depends on every page that came
        return {"seconds": seconds, "step_seconds": statistics.median(steps), "digest": digest.hexdigest()}

    async def _pass(self, tokens: list[int], start: int, lease: KvLease) -> torch.Tensor:
        span = TokenSpan(tokens, start, lease.pages.tolist())
        return (await trio.to_thread.run_sync(self._model.runner.step, [span]))[0]
