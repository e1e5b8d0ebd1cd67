"""The W3C trace context of the running task: asks carry it to the handler, in this process and in others.

Runs anywhere; one context variable and nothing else.
"""

from __future__ import annotations

from contextvars import ContextVar

trace_context: ContextVar[str | None] = ContextVar("asyncfabric_trace", default=None)
"""The `traceparent` of what the task works on; set it before asking, handlers find it set."""
