"""The metrics of a runner: passes, their length and width, and pages in use. Used on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from asyncfabric_services.health.metrics import BoundedCounter, gauge, histogram
from asyncfabric_services.runner.page_supply import PageSupply

if TYPE_CHECKING:
    from asyncfabric_services.runner.scheduler import Plan, Scheduler

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RunnerMeter:
    """Registers a runner's metrics in `registry`."""

    def __init__(self, registry: CollectorRegistry, scheduler: Scheduler, supply: PageSupply) -> None:
        self._seconds = histogram(registry, "runner_pass", "seconds", "Length of one forward pass.")
        self._width = histogram(registry, "runner_pass", "requests", "Requests computed together in one pass.", WIDTHS)
        self._tokens = BoundedCounter(
            registry, "runner_computed", "tokens_total", "Tokens computed.", kind=("prompt", "answer")
        )
        running = gauge(registry, "runner_running", "requests", "Requests that hold pages.")
        running.set_function(lambda: scheduler.running)
        waiting = gauge(registry, "runner_waiting", "requests", "Requests that wait for pages.")
        waiting.set_function(lambda: scheduler.waiting)
        leased = gauge(registry, "runner_leased", "pages", "Pages that requests hold.")
        leased.set_function(lambda: supply.pages - supply.free)

    def passed(self, plan: Plan, seconds: float) -> None:
        """Record one pass."""
        self._seconds.observe(seconds)
        self._width.observe(len(plan))
        for _, span in plan:
            self._tokens.add(len(span.tokens), kind="answer" if len(span.tokens) == 1 else "prompt")
