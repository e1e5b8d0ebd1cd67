"""The metrics of a router: requests by status, their times, and tokens in and out. Used on the event loop."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from asyncfabric_services.health.metrics import BoundedCounter, gauge, histogram

STATUSES = ("200", "400", "404", "408", "413", "429", "499", "500", "502", "503", "504")

PRIORITIES = ("above", "default", "below")


class RouterMeter:
    """Registers a router's metrics in `registry`; `inside` and `waiting` count the requests that are, and that wait."""

    def __init__(self, registry: CollectorRegistry, inside: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._requests = BoundedCounter(
            registry, "router", "requests_total", "Requests.", endpoint=("chat", "completions"), status=STATUSES
        )
        self._seconds = histogram(registry, "router_request", "seconds", "From the request to the end of its answer.")
        self._first = histogram(registry, "router_first_token", "seconds", "From the request to its first token.")
        self._tokens = BoundedCounter(registry, "router", "tokens_total", "Tokens.", kind=("prompt", "answer"))
        gauge(registry, "router_inside", "requests", "Requests being answered.").set_function(inside)
        gauge(registry, "router_waiting", "requests", "Requests that wait for their turn.").set_function(waiting)
        self._waited = BoundedCounter(
            registry, "router_waited", "requests_total", "Requests that waited for their turn.", priority=PRIORITIES
        )
        self._waits = BoundedCounter(
            registry, "router_waited", "seconds_total", "How long requests waited for their turn.", priority=PRIORITIES
        )

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one request; 499 stands for a client that left."""
        self._requests.add(endpoint=endpoint, status=str(status))
        self._seconds.observe(seconds)

    def waited(self, priority: int, seconds: float) -> None:
        """Count a request that waited for its turn, whether that came or not; priorities below 0 come first."""
        name = PRIORITIES[(priority > 0) - (priority < 0) + 1]
        self._waited.add(priority=name)
        self._waits.add(seconds, priority=name)

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token."""
        self._first.observe(seconds)

    def generated(self, prompt: int, answer: int) -> None:
        """Count tokens."""
        self._tokens.add(prompt, kind="prompt")
        self._tokens.add(answer, kind="answer")
