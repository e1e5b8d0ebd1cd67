"""What a node with vLLM in it shows: blocks and rates among its metrics, what its requests wait for, its transfers.

vLLM's engine runs in processes of its own; what they count comes with the outputs of their steps. On the event loop,
but `Transfers.report`, which vLLM's thread calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import trio
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncfabric import Waiting
from asyncfabric.observe.spans import SpanRing

REMEMBERED = 4096
"""Requests whose trace is known: a transfer is reported after its request has ended here."""


class VllmMetrics(Collector):
    """Shows what vLLM counts, its connector's transfers too, and the same by the names of other nodes."""

    def __init__(self, blocks: Callable[[], int]) -> None:
        """Take `blocks()` as how many blocks the engines of this node have."""
        self._blocks = blocks

    def collect(self) -> Iterable[Metric]:
        """Return vLLM's metrics, then blocks as pages, computed tokens, and bytes that were pushed."""
        found = [metric for metric in REGISTRY.collect() if metric.name.startswith("vllm")]
        yield from found
        used = list(_values(found, "vllm:kv_cache_usage_perc"))
        whole = self._blocks() - len(used)  # of each engine vLLM keeps one for itself
        if used and whole > 0:
            held = round(sum(used) / len(used) * whole)
            yield GaugeMetricFamily("asyncfabric_kv_held_pages", "Blocks that requests of vLLM hold.", held)
            yield GaugeMetricFamily("asyncfabric_kv_free_pages", "Blocks that requests may be given.", whole - held)
        tokens = CounterMetricFamily(
            "asyncfabric_runner_computed_tokens",
            "Tokens that vLLM computed and did not load.",
            None,
            ["kind"],
        )
        computed = _values(found, "vllm:prompt_tokens_by_source_total", source="local_compute")
        tokens.add_metric(["prompt"], sum(computed))
        tokens.add_metric(["answer"], sum(_values(found, "vllm:generation_tokens_total")))
        yield tokens
        written = CounterMetricFamily(
            "asyncfabric_written_bytes", "Bytes of KvCache that vLLM's workers pushed.", None, ["fabric"]
        )
        written.add_metric(["fabric"], sum(_values(found, "vllm:asyncfabric_pushed_bytes_total")))
        yield written


def _values(metrics: Iterable[Metric], name: str, **labels: str) -> Iterator[float]:
    for metric in metrics:
        for sample in metric.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample.value


@dataclass(eq=False)
class Waits:
    """The requests in a node, and what each waits for."""

    _lines: dict[object, Waiting] = field(default_factory=dict)

    @contextmanager
    def open(self, what: str, waits_for: str, need: int, *missing_from: str) -> Iterator[Callable[[], None]]:
        """Show a wait within the scope; what is yielded ends it earlier."""
        key = object()
        self._lines[key] = Waiting(what, waits_for, 0, need, missing_from, monotonic())

        def end() -> None:
            self._lines.pop(key, None)

        try:
            yield end
        finally:
            end()

    def lines(self) -> list[Waiting]:
        """Return them, the oldest first."""
        return list(self._lines.values())


class Transfers:
    """Spans of the pushes and loads that the engine's processes report, under the traces of their requests."""

    def __init__(self, spans: SpanRing) -> None:
        self._spans = spans
        self._contexts: OrderedDict[str, str] = OrderedDict()
        self._trio = trio.lowlevel.current_trio_token()

    def begin(self, request: str, context: str) -> None:
        """Take the trace of a request."""
        self._contexts[request] = context
        while len(self._contexts) > REMEMBERED:
            self._contexts.popitem(last=False)

    def report(self, name: str, transfer: dict[str, Any]) -> None:
        """Take a transfer that has ended, from any thread."""
        if self._spans.active:
            self._trio.run_sync_soon(self._add, name, transfer)

    def _add(self, name: str, transfer: dict[str, Any]) -> None:
        request = str(transfer["request"])
        known = request if request in self._contexts else request.rpartition("-")[0]  # vLLM adds letters of its own
        self._spans.add_ended(
            name,
            self._contexts.get(known, ""),
            transfer["begin_ns"],
            transfer["end_ns"],
            request=known,
            bytes=transfer["bytes"],
        )
