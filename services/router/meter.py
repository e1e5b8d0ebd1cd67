"""The metrics of a router: requests by status, their times, and tokens in and out. Used on the event loop."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from asyncfabric_services.health.metrics import BoundedCounter, gauge, histogram

STATUSES = ("200", "400", "404", "408", "413", "429", "499", "500", "502", "503", "504")


class RouterMeter:
    """Registers a router's metrics in `registry`; `inside` returns how many requests are being answered."""

    def __init__(self, registry: CollectorRegistry, inside: Callable[[], int]) -> None:
        self._requests = BoundedCounter(
            registry, "router", "requests_total", "Requests.", endpoint=("chat", "completions"), status=STATUSES
        )
        self._seconds = histogram(registry, "router_request", "seconds", "From the request to the end of its answer.")
        self._first = histogram(registry, "router_first_token", "seconds", "From the request to its first token.")
        self._tokens = BoundedCounter(registry, "router", "tokens_total", "Tokens.", kind=("prompt", "answer"))
        gauge(registry, "router_inside", "requests", "Requests being answered.").set_function(inside)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one request; 499 stands for a client that left."""
        self._requests.add(endpoint=endpoint, status=str(status))
        self._seconds.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token."""
        self._first.observe(seconds)

    def generated(self, prompt: int, answer: int) -> None:
        """Count tokens."""
        self._tokens.add(prompt, kind="prompt")
        self._tokens.add(answer, kind="answer")
