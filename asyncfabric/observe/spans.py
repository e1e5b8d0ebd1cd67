"""Spans: what a program did for a request, from when to when, under a W3C trace context that joins processes.

A ring of the newest spans, off until somebody records, and an exporter that takes each span where there is one; used on
one thread, usually the event loop's. Times are on CLOCK_MONOTONIC, as those of the engine's trace points, so that both
are drawn in one picture (`observe.trace`).
"""

from __future__ import annotations

import random
import re
import time
from collections import deque
from types import TracebackType
from typing import NamedTuple, Protocol

import msgspec

KEPT = 8192
MOST_STATE = 448
"""Characters of a tracestate that are passed on: with its traceparent it fits into the trace of a link's message."""
SAMPLED, RANDOM = 1, 2
Value = str | int | float | bool
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took time.

    Attributes:
        name: what it was, of few words that do not vary.
        begin_ns, end_ns: on CLOCK_MONOTONIC.
        trace: 32 hexadecimal digits that all spans of a request share, in whatever process; empty without one.
        id: 16 hexadecimal digits.
        parent: id of the span that this is a part of, perhaps in another process; empty for the first.
        args: what varies.
    """

    name: str
    begin_ns: int
    end_ns: int
    trace: str = ""
    id: str = ""
    parent: str = ""
    args: dict[str, Value] = {}


class TraceContext(NamedTuple):
    """A W3C trace context.

    Attributes:
        trace: 32 hexadecimal digits.
        span: 16 hexadecimal digits, of the span that what comes is a part of.
        flags: SAMPLED, when its spans are exported, and RANDOM.
        state: tracestate, what vendors of the client added; empty for nothing.
    """

    trace: str
    span: str
    flags: int = SAMPLED
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether its spans are exported."""
        return bool(self.flags & SAMPLED)

    def text(self) -> str:
        """Return it as nodes pass it on: a traceparent and, after a space, the tracestate if there is one."""
        parent = f"00-{self.trace}-{self.span}-{self.flags:02x}"
        return f"{parent} {self.state}" if self.state else parent


def parse_context(text: str) -> TraceContext | None:
    """Return what `TraceContext.text` or a client wrote, None for text that is no W3C traceparent (section 3.2)."""
    parent, _, state = text.partition(" ")
    found = _TRACEPARENT.fullmatch(parent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace, span = found[2], found[3]
    if trace.strip("0") == "" or span.strip("0") == "":
        return None
    return TraceContext(trace, span, int(found[4], 16) & (SAMPLED | RANDOM), state)


def read_context(traceparent: str, tracestate: str = "") -> str:
    """Return the context of a request's headers as text; empty where the traceparent cannot be used.

    Entries of the tracestate that make it longer than MOST_STATE are left out: those over 128 characters first, then
    the last (W3C Trace Context, section 3.3.1.5).
    """
    context = parse_context(traceparent)
    if context is None or " " in traceparent:
        return ""
    entries = [entry for part in tracestate.split(",") if (entry := part.strip())]
    if not tracestate.isascii() or not tracestate.isprintable() or len(entries) > 32:
        entries = []
    while len(",".join(entries)) > MOST_STATE:
        long = [number for number, entry in enumerate(entries) if len(entry) > 128]
        del entries[long[-1] if long else -1]
    return context._replace(state=",".join(entries)).text()


def new_context() -> TraceContext:
    """Return a context for a request that came without one."""
    return TraceContext(_random_digits(32), _random_digits(16))


def _random_digits(count: int) -> str:
    """Return hexadecimal digits of a generator that each process, forked ones too, seeds anew: ids are no secrets."""
    return f"{random.getrandbits(4 * count):0{count}x}"


class SpanExporter(Protocol):
    """What takes spans that ended to where traces are collected; on the ring's thread, so it must not block."""

    def samples(self, trace: str) -> bool:
        """Return whether the spans of a new trace are exported."""
        ...

    def export(self, span: Span, context: TraceContext) -> None:
        """Take a span of a trace that is sampled; `context` is that of its parent, for the first span its own."""
        ...


class OpenSpan:
    """A span that has begun; made by `ring.open`, ended by leaving its `with` block."""

    __slots__ = ("_begin_ns", "_first", "_given", "_id", "_parsed", "_ring", "args", "name")

    def __init__(self, ring: SpanRing, name: str, context: str, args: dict[str, Value], *, first: bool = False) -> None:
        """Not for users: `with ring.open(...)`."""
        self.name: str = name
        self.args: dict[str, Value] = args
        self._ring = ring
        self._given = context
        self._first = first
        self._id = ""
        self._parsed: TraceContext | None = None
        self._begin_ns = time.monotonic_ns()

    @property
    def recorded(self) -> bool:
        """Whether the span is kept or exported, as things stand."""
        return self._ring.on or self._exported

    @property
    def context(self) -> str:
        """The trace context for what is done within the span: in other calls, or in other processes."""
        parsed = self._parse() if self.recorded else None
        return self._given if parsed is None else parsed._replace(span=self._number()).text()

    def note(self, **args: Value) -> None:
        """Add what became known meanwhile."""
        self.args.update(args)

    def __enter__(self) -> OpenSpan:
        self._ring.running[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._ring.running[self]
        if kind is not None:
            self.args["ended_by"] = kind.__name__
        self.end(time.monotonic_ns())

    def end(self, end_ns: int) -> None:
        """Keep and export the span; leaving the `with` block does."""
        if self._ring.on:
            self._ring.spans.append(self.as_span(end_ns))
        exporter, context = self._ring.exporter, self._parse() if self._exported else None
        if exporter is not None and context is not None:
            exporter.export(self.as_span(end_ns), context)

    def as_span(self, end_ns: int) -> Span:
        """Return the span as if it ended now."""
        context = self._parse()
        return Span(
            name=self.name,
            begin_ns=self._begin_ns,
            end_ns=end_ns,
            trace=context.trace if context is not None else "",
            id=self._number(),
            parent=context.span if context is not None and not self._first else "",
            args=dict(self.args),
        )

    @property
    def _exported(self) -> bool:
        context = self._parse() if self._ring.exporter is not None else None
        return context is not None and context.sampled

    def _parse(self) -> TraceContext | None:
        if self._parsed is None and self._given:
            self._parsed = parse_context(self._given)
        return self._parsed

    def _number(self) -> str:
        context = self._parse()
        self._id = self._id or (context.span if context is not None and self._first else _random_digits(16))
        return self._id


class SpanRing:
    """The newest spans of a process while it is on; off, an open span costs an object and a look at the clock.

    Attributes:
        on: whether spans that end are kept.
        spans: those that ended, the oldest first, at most `most`.
        running: those that have begun and not ended.
        exporter: takes spans that ended, whether the ring is on or not; None for nobody.
    """

    def __init__(self, most: int = KEPT) -> None:
        """Make a ring that is off."""
        self.on: bool = False
        self.spans: deque[Span] = deque(maxlen=most)
        self.running: dict[OpenSpan, None] = {}
        self.exporter: SpanExporter | None = None

    @property
    def active(self) -> bool:
        """Whether somebody takes spans."""
        return self.on or self.exporter is not None

    def open(self, name: str, context: str = "", **args: Value) -> OpenSpan:
        """Return a span for a `with` block; `context` is the trace context of its parent, `args` what varies."""
        return OpenSpan(self, name, context, args)

    def open_request(self, name: str, given: str, **args: Value) -> OpenSpan:
        """Return the span of a request from outside: a part of `given`, or the first of a new trace without one."""
        if given:
            return OpenSpan(self, name, given, args)
        context = new_context()
        if self.exporter is not None and not self.exporter.samples(context.trace):
            context = context._replace(flags=0)
        return OpenSpan(self, name, context.text(), args, first=True)

    def add(self, name: str, context: str, begin_ns: int, **args: Value) -> None:
        """Keep or export a span that began at `begin_ns` and ends now."""
        self.add_ended(name, context, begin_ns, time.monotonic_ns(), **args)

    def add_ended(self, name: str, context: str, begin_ns: int, end_ns: int, **args: Value) -> None:
        """Keep or export a span of the past, perhaps of another process of this host."""
        if self.active:
            span = OpenSpan(self, name, context, args)
            span._begin_ns = begin_ns
            span.end(end_ns)

    def take(self) -> list[Span]:
        """Return what is kept and forget it; spans that still run are in it too, marked as such."""
        now_ns = time.monotonic_ns()
        taken = [*self.spans]
        self.spans.clear()
        for span in self.running:
            running = span.as_span(now_ns)
            taken.append(msgspec.structs.replace(running, args=running.args | {"unfinished": True}))
        return taken
