"""What OpenTelemetry's environment variables ask a node for, and a registry as OTLP metrics. No network."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("hypercorn", reason="services need the extra serve")
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.router.server import StartError
from asyncfabric_services.telemetry.export import asked_signals, telemetry_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, set()),
        (ENDPOINT, {"traces", "metrics"}),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, set()),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, {"traces"}),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {"traces", "metrics"}),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, {"traces"}),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4318/v1/metrics"}, {"metrics"}),
    ],
)
def test_what_is_asked_for(environment: dict[str, str], asked: set[str]) -> None:
    assert asked_signals(environment) == asked


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "is 'grpc' for traces: nodes send http/protobuf, .* port 4318"),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "OTEL_METRICS_EXPORTER is 'prometheus': nodes know otlp and none"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(environment: dict[str, str], text: str) -> None:
    with pytest.raises(StartError, match=text):
        telemetry_of("n", "router", ENDPOINT | environment)


def test_without_the_extra_the_error_has_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("asyncfabric_services.telemetry.")]:
        if not name.endswith(".export"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(EnvironmentUnfit, match=r"pip install 'asyncfabric\[otel\]'"):
        telemetry_of("n", "router", ENDPOINT)
    telemetry_of("n", "router", {})  # nothing is asked for, so nothing is missing


def test_a_registry_keeps_its_names_values_and_buckets() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="OTLP METRICS WERE NOT TESTED: the extra otel is not installed")
    from asyncfabric_services.telemetry.metrics import converted

    registry = CollectorRegistry()
    Gauge("asyncfabric_kv_free_pages", "Pages.", registry=registry).set(7)
    counter = Counter("asyncfabric_router_retries_total", "Retries.", ["because"], registry=registry)
    counter.labels("lost").inc(3)
    counter.labels("busy")
    histogram = Histogram("asyncfabric_pass_seconds", "Passes.", ["of"], registry=registry, buckets=(0.1, 1.0))
    for of, value in (("a", 0.05), ("a", 0.5), ("a", 5), ("b", 0.5)):
        histogram.labels(of).observe(value)

    found: dict[str, Any] = {metric.name: metric for metric in converted(list(registry.collect()), 1, 2)}
    assert [point.value for point in found.pop("asyncfabric_kv_free_pages").data.data_points] == [7]
    retries = found.pop("asyncfabric_router_retries_total")
    assert (retries.description, retries.data.is_monotonic) == ("Retries.", True)
    points = [(point.attributes, point.value, point.start_time_unix_nano) for point in retries.data.data_points]
    assert points == [({"because": "lost"}, 3, 1), ({"because": "busy"}, 0, 1)]
    a, b = found.pop("asyncfabric_pass_seconds").data.data_points
    assert (a.attributes, a.count, a.sum, a.explicit_bounds) == ({"of": "a"}, 3, 5.55, (0.1, 1.0))
    assert (a.bucket_counts, b.bucket_counts, found) == ([1, 1, 1], [0, 1, 0], {})
