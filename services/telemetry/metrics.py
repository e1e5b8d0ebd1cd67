"""A Prometheus registry as OTLP metrics: read on the event loop, where collectors belong, and exported on a thread.

Names, labels and buckets are those of `/metrics`: counters are cumulative monotonic sums, histograms keep their bounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import trio
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from asyncfabric_services.version import installed_version

SCOPE = InstrumentationScope("asyncfabric", installed_version())
INTERVAL_MS = 60_000
"""As OpenTelemetry has it, where OTEL_METRIC_EXPORT_INTERVAL does not set it."""


class MetricsExport:
    """Exports registries of one process."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._exporter = OTLPMetricExporter()
        self._began_ns = time.time_ns()
        self._interval_s = int(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or INTERVAL_MS) / 1000

    async def run(self, registry: CollectorRegistry) -> None:
        """Export again and again.

        Cancellation: ends it; an export in progress is left to its thread.
        """
        while True:
            await trio.sleep(self._interval_s)
            await self.export(registry)

    async def export(self, registry: CollectorRegistry) -> None:
        """Export once; what fails is logged by the exporter.

        Cancellation: the export is left to its thread.
        """
        families = list(registry.collect())
        await trio.to_thread.run_sync(self._export, families, abandon_on_cancel=True)

    def _export(self, families: Sequence[Metric]) -> None:
        metrics = list(converted(families, self._began_ns, time.time_ns()))
        scopes = [otlp.ScopeMetrics(SCOPE, metrics, "")]
        self._exporter.export(otlp.MetricsData([otlp.ResourceMetrics(self._resource, scopes, "")]))


def converted(families: Sequence[Metric], began_ns: int, now_ns: int) -> Iterator[otlp.Metric]:
    """Yield OTLP metrics of Prometheus families, counted since `began_ns`."""
    for family in families:
        samples: dict[str, list[Sample]] = {}
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                samples.setdefault(sample.name, []).append(sample)
        if family.type == "histogram":
            points = list(_histogram_points(family.name, samples, began_ns, now_ns))
            yield _metric(family.name, family, otlp.Histogram(points, otlp.AggregationTemporality.CUMULATIVE))
            continue
        for name, same in samples.items():
            numbers = [otlp.NumberDataPoint(dict(one.labels), began_ns, now_ns, one.value) for one in same]
            if family.type == "counter":
                yield _metric(name, family, otlp.Sum(numbers, otlp.AggregationTemporality.CUMULATIVE, True))
            else:
                yield _metric(name, family, otlp.Gauge(numbers))


def _metric(name: str, family: Metric, data: Any) -> otlp.Metric:
    return otlp.Metric(name, family.documentation, "", data)  # the unit is in the name


def _histogram_points(
    name: str, samples: dict[str, list[Sample]], began_ns: int, now_ns: int
) -> Iterator[otlp.HistogramDataPoint]:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    for one in samples.get(f"{name}_bucket", ()):
        labels = tuple(sorted((key, value) for key, value in one.labels.items() if key != "le"))
        buckets.setdefault(labels, []).append((float(one.labels["le"]), int(one.value)))
    sums = {tuple(sorted(one.labels.items())): one.value for one in samples.get(f"{name}_sum", ())}
    for labels, pairs in buckets.items():
        bounds, totals = zip(*sorted(pairs), strict=True)
        counts = [total - before for total, before in zip(totals, (0, *totals[:-1]), strict=True)]
        unknown: Any = None  # Prometheus keeps no least and no greatest value
        yield otlp.HistogramDataPoint(
            dict(labels), began_ns, now_ns, totals[-1], sums[labels], counts, bounds[:-1], unknown, unknown
        )
