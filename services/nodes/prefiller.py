"""Computes prompts, but for what kept pages hold, and streams their pages, layer by layer, to the nodes that asked.

Jobs run on the event loop, passes on a worker thread, one at a time; a job gives way to others after each chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import torch
import trio
from prometheus_client import CollectorRegistry

from asyncfabric import Fabric
from asyncfabric.actors import Node, labels_of
from asyncfabric.control import Link
from asyncfabric.kv import KvJob, KvLease, KvOutbox, KvStream, deliver, open_kv_channel, open_outbox
from asyncfabric.observe.spans import OpenSpan, SpanRing, Value
from asyncfabric_services.health.metrics import BoundedCounter
from asyncfabric_services.health.view import View
from asyncfabric_services.nodes.messages import LAYOUT_LABEL, PREFIX_LABEL, decode_prompt
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.paged_model import PagedModel, open_paged_model
from asyncfabric_services.nodes.prefix_cache import HeldPrompt
from asyncfabric_services.nodes.sight import FabricSight
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.runner.batch import TokenSpan
from asyncfabric_services.runner.runner import chunks

_log = logging.getLogger(__name__)


class StreamMeter:
    """What streams moved, how long they were open, and how much of that no computation hid."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = BoundedCounter(registry, "kv_sent", "bytes_total", "Bytes of pages and contexts sent.")
        self._open = BoundedCounter(
            registry, "kv_stream", "seconds_total", "From the first page sent to the last acknowledged."
        )
        self._tokens = BoundedCounter(registry, "prefill_computed", "tokens_total", "Prompt tokens computed.")
        self._found = BoundedCounter(
            registry, "prefix_hit", "tokens_total", "Prompt tokens that earlier prompts had computed."
        )
        self._exposed = BoundedCounter(
            registry, "kv_exposed", "seconds_total", "From the end of the computation to the last acknowledged page."
        )

    def computed(self, tokens: int) -> None:
        """Count a computed chunk."""
        self._tokens.add(tokens)

    def found(self, tokens: int) -> None:
        """Count the tokens of a prompt that were in kept pages."""
        self._found.add(tokens)

    def streamed(self, sent_bytes: int, open_seconds: float, exposed_seconds: float) -> None:
        """Count one finished stream."""
        self._bytes.add(sent_bytes)
        self._open.add(open_seconds)
        self._exposed.add(exposed_seconds)


class Pushing:
    """Pushes layers from the compute thread: posted on the event loop, which the thread does not wait for."""

    def __init__(self, stream: KvStream) -> None:
        self.began: float | None = None
        self.began_ns = 0
        self.stream = stream
        self._failure: Exception | None = None
        self._loop = trio.lowlevel.current_trio_token()

    def after_layer(self, layer: int, positions: range) -> None:
        """Take a computed layer; on the compute thread. Raises what ends the job: its cancellation or a failed push."""
        trio.from_thread.check_cancelled()
        self.check()
        self._loop.run_sync_soon(self._push, layer, positions.stop)

    def check(self) -> None:
        """Raise what a push raised."""
        if self._failure is not None:
            raise self._failure

    def _push(self, layer: int, tokens_ready: int) -> None:
        if self.began is None:
            self.began, self.began_ns = trio.current_time(), time.monotonic_ns()
        if self._failure is None:
            try:
                self.stream.push(layer, tokens_ready)
            except Exception as error:  # raised in the job: here it would end the event loop
                self._failure = error


class Prefiller:
    """Serves the jobs of an outbox."""

    def __init__(
        self, model: PagedModel, admission: RequestAdmission, spans: SpanRing, chunk_tokens: int, meter: StreamMeter
    ) -> None:
        self._model = model
        self._admission = admission
        self._spans = spans
        self._chunk_tokens = chunk_tokens
        self._meter = meter
        self._turn = trio.Lock()  # fair: jobs take turns
        # Who waits in the pool's queue, where nobody is overtaken, waits for pages alone.
        self._contexts = trio.CapacityLimiter(model.pool.ledger.slots)

    async def serve(self, job: KvJob) -> None:
        """Compute the prompt of an offer and stream it; raises ValueError for a prompt that is none.

        Cancellation: ends after the layer in progress; the stream drains before the pages are free.
        """
        offer, model = job.offer, self._model
        prompt = decode_prompt(offer.body, offer.tokens, model.loaded.tokenizer.vocabulary)
        with (
            self._admission.admit() as place,
            self._spans.open("prefill", offer.trace, lease=offer.lease, tokens=offer.tokens) as span,
            place.scope,
        ):
            async with self._contexts:
                with self._spans.open("wait for pages", span.context):
                    context = await model.pool.lease("prefill", pages=0, context=True)
                async with context:
                    await self._serve(job, prompt, context, span)

    async def _serve(self, job: KvJob, prompt: list[int], context: KvLease, span: OpenSpan) -> None:
        async with AsyncExitStack() as stack:
            with self._spans.open("wait for pages", span.context):
                held = await stack.enter_async_context(self._model.prefixes.hold(prompt))
            stream = await stack.enter_async_context(job.open_stream(held.pages))
            self._meter.found(held.ready)
            span.note(found=held.ready)
            pushing = Pushing(stream)
            try:
                await self._stream(prompt, held, context, pushing, span.context)
            finally:
                if pushing.began is not None:
                    self._spans.add("stream", span.context, pushing.began_ns, **_about(stream))

    async def _stream(
        self, prompt: list[int], held: HeldPrompt, lease: KvLease, pushing: Pushing, context: str
    ) -> None:
        stream = pushing.stream
        with self._spans.open("compute", context, tokens=len(prompt) - held.ready) as span:
            logits = await self._compute(prompt, held, pushing, span.context)
        computed = trio.current_time()
        pushing.check()
        lease.context.memory[:] = logits.numpy().tobytes()
        await stream.finish(lease.context)
        now = trio.current_time()
        began = computed if pushing.began is None else pushing.began
        self._meter.streamed(stream.bytes, now - began, now - computed)

    async def _compute(self, prompt: list[int], held: HeldPrompt, pushing: Pushing, context: str) -> torch.Tensor:
        logits, table = torch.empty(0), held.pages.tolist()
        for first, end in chunks(len(prompt), self._chunk_tokens, held.ready):
            span = TokenSpan(prompt[first:end], first, table, pushing.after_layer)
            async with self._turn:
                with self._spans.open("chunk", context, first=first, tokens=end - first):
                    logits = (await trio.to_thread.run_sync(self._model.runner.step, [span]))[0]
            self._meter.computed(end - first)
        return logits


def _about(stream: KvStream) -> dict[str, Value]:
    imms = ", ".join(map(str, stream.offer.layer_imms))
    return {"lease": stream.offer.lease, "pieces": stream.pieces, "bytes": stream.bytes, "imms": imms}


class PagedPrefill:
    """The reference runner as the engine of a prefill node: decode nodes ask it by the fabric."""

    def __init__(self, model: PagedModel, outbox: KvOutbox, *, keeps_prefixes: bool) -> None:
        layout = msgspec.json.encode(model.pool.layout).decode()
        self.labels = labels_of(bytes(model.fabric.address)) | {LAYOUT_LABEL: layout}
        if keeps_prefixes:
            self.labels[PREFIX_LABEL] = str(model.pool.layout.page_tokens)
        self.fabric: Fabric | None = model.fabric
        self._model = model
        self._outbox = outbox

    async def join(self, node: Node) -> None:
        """Spawn nothing: offers come by the fabric."""

    def drain(self) -> None:
        """Take no new offers."""
        self._outbox.drain()

    def view(self, link: Link, names: NodeNames) -> View:
        """Return what the node shows of itself."""
        return FabricSight(self._model, link, names, self._outbox).view()


@asynccontextmanager
async def open_paged_prefill(stage: Stage) -> AsyncIterator[PagedPrefill]:
    """Open model, fabric, pool and outbox as the settings ask. Raises StartError.

    Cancellation: jobs are cancelled and drain, their leaseholders are notified.
    """
    async with (
        open_paged_model(stage) as model,
        open_kv_channel(model.fabric) as channel,
        trio.open_nursery() as nursery,
    ):
        meter = StreamMeter(stage.registry)
        prefiller = Prefiller(model, stage.admission, stage.spans, stage.settings.batch.chunk_tokens, meter)
        async with open_outbox(model.fabric, model.pool, channel, prefiller.serve) as outbox:
            nursery.start_soon(deliver, channel, [outbox])
            yield PagedPrefill(model, outbox, keeps_prefixes=stage.settings.cache.prefixes == "keep")
        nursery.cancel_scope.cancel()
