"""Spans: what a program did for a request, from when to when, under a W3C trace context that joins processes.

A ring of the newest spans, off until somebody records; used on one thread, usually the event loop's. Times are on
CLOCK_MONOTONIC, as those of the engine's trace points, so that both are drawn in one picture (`observe.trace`).
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from types import TracebackType

import msgspec

KEPT = 8192
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


def parse_context(text: str) -> tuple[str, str] | None:
    """Return (trace id, span id) of a W3C traceparent, None for text that is none (W3C Trace Context, section 3.2)."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace, span = found[2], found[3]
    return None if trace.strip("0") == "" or span.strip("0") == "" else (trace, span)


def new_context() -> str:
    """Return a traceparent for a request that came without one."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


class OpenSpan:
    """A span that has begun; made by `ring.open`, ended by leaving its `with` block."""

    __slots__ = ("_begin_ns", "_given", "_id", "_ring", "args", "name")

    def __init__(self, ring: SpanRing, name: str, context: str, args: dict[str, Value]) -> None:
        """Not for users: `with ring.open(...)`."""
        self.name: str = name
        self.args: dict[str, Value] = args
        self._ring = ring
        self._given = context
        self._id = ""
        self._begin_ns = time.monotonic_ns()

    @property
    def context(self) -> str:
        """The traceparent for what is done within the span: in other calls, or in other processes."""
        parsed = parse_context(self._given) if self._ring.on else None
        return self._given if parsed is None else f"00-{parsed[0]}-{self._number()}-01"

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
        if self._ring.on:
            if kind is not None:
                self.args["ended_by"] = kind.__name__
            self._ring.spans.append(self.as_span(time.monotonic_ns()))

    def as_span(self, end_ns: int) -> Span:
        """Return the span as if it ended now."""
        trace, parent = parse_context(self._given) or ("", "")
        return Span(
            name=self.name,
            begin_ns=self._begin_ns,
            end_ns=end_ns,
            trace=trace,
            id=self._number(),
            parent=parent,
            args=dict(self.args),
        )

    def _number(self) -> str:
        self._id = self._id or secrets.token_hex(8)
        return self._id


class SpanRing:
    """The newest spans of a process while it is on; off, an open span costs an object and a look at the clock.

    Attributes:
        on: whether spans that end are kept.
        spans: those that ended, the oldest first, at most `most`.
        running: those that have begun and not ended.
    """

    def __init__(self, most: int = KEPT) -> None:
        """Make a ring that is off."""
        self.on: bool = False
        self.spans: deque[Span] = deque(maxlen=most)
        self.running: dict[OpenSpan, None] = {}

    def open(self, name: str, context: str = "", **args: Value) -> OpenSpan:
        """Return a span for a `with` block; `context` is the traceparent of its parent, `args` what varies."""
        return OpenSpan(self, name, context, args)

    def add(self, name: str, context: str, begin_ns: int, **args: Value) -> None:
        """Keep a span that began at `begin_ns` and ends now, if the ring is on."""
        self.add_ended(name, context, begin_ns, time.monotonic_ns(), **args)

    def add_ended(self, name: str, context: str, begin_ns: int, end_ns: int, **args: Value) -> None:
        """Keep a span of the past, perhaps of another process of this host, if the ring is on."""
        if self.on:
            span = OpenSpan(self, name, context, args)
            span._begin_ns = begin_ns
            self.spans.append(span.as_span(end_ns))

    def take(self) -> list[Span]:
        """Return what is kept and forget it; spans that still run are in it too, marked as such."""
        now_ns = time.monotonic_ns()
        taken = [*self.spans]
        self.spans.clear()
        for span in self.running:
            running = span.as_span(now_ns)
            taken.append(msgspec.structs.replace(running, args=running.args | {"unfinished": True}))
        return taken
