"""Spans of a ring as OpenTelemetry's: ids, parents and times kept. Batches leave on the thread of the SDK's processor.

The SDK does not open these spans: they have begun and ended already, some of them in another process, under ids that
other nodes know. So they are handed to its processor as what it reads.
"""

from __future__ import annotations

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from asyncfabric.observe.spans import Span, TraceContext
from asyncfabric_services.version import installed_version

SCOPE = InstrumentationScope("asyncfabric", installed_version())
KINDS = {
    "request": SpanKind.SERVER,
    "attempt": SpanKind.CLIENT,
    "answer": SpanKind.SERVER,
    "fill prompt": SpanKind.CLIENT,
    "prefill prompt": SpanKind.CLIENT,
    "prefill": SpanKind.SERVER,
}
"""Kinds of the spans that cross from one process to another, by name; the others are internal."""
CLOCK_STEP_NS = 1_000_000
UNSET = Status(StatusCode.UNSET)


def resource_of(name: str, role: str) -> Resource:
    """Return what describes a node, with what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add or replace."""
    ours = {"service.namespace": "asyncfabric", "service.name": f"asyncfabric-{role}", "service.instance.id": name}
    return Resource.create({**ours, "service.version": installed_version()}).merge(OTELResourceDetector().detect())


class SpansExport:
    """Takes the spans of one process; sampler and batches are as OpenTelemetry's environment variables have them."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        self._ahead_ns = _wall_ahead_ns()

    def samples(self, trace: str) -> bool:
        """Return whether the spans of a new trace are exported."""
        return self._sampler.should_sample(None, int(trace, 16), "request").decision is Decision.RECORD_AND_SAMPLE

    def export(self, span: Span, context: TraceContext) -> None:
        """Take a span that ended."""
        ahead_ns = _wall_ahead_ns()
        if abs(ahead_ns - self._ahead_ns) > CLOCK_STEP_NS:  # kept else, so that children lie within their parents
            self._ahead_ns = ahead_ns
        kind = KINDS.get(span.name, SpanKind.INTERNAL)
        state = TraceState.from_header([context.state]) if context.state else None
        flags, trace = TraceFlags(context.flags), int(span.trace, 16)
        parent = SpanContext(trace, int(span.parent, 16), kind is SpanKind.SERVER, flags) if span.parent else None
        self._processor.on_end(
            ReadableSpan(
                span.name,
                SpanContext(trace, int(span.id, 16), False, flags, state),
                parent,
                self._resource,
                {f"asyncfabric.{key}": value for key, value in span.args.items()},
                kind=kind,
                status=_status(span),
                start_time=span.begin_ns + self._ahead_ns,
                end_time=span.end_ns + self._ahead_ns,
                instrumentation_scope=SCOPE,
            )
        )

    def close(self) -> None:
        """Export what is left; blocking."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _status(span: Span) -> Status:
    ended_by, status = str(span.args.get("ended_by", "Cancelled")), span.args.get("status", 200)
    if ended_by != "Cancelled":  # a client that left is no error of ours
        return Status(StatusCode.ERROR, ended_by)
    return Status(StatusCode.ERROR, f"HTTP {status}") if isinstance(status, int) and status >= 500 else UNSET


def _wall_ahead_ns() -> int:
    return time.time_ns() - time.monotonic_ns()
