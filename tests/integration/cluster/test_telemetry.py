"""OpenTelemetry of a cluster of real processes: what an OTLP receiver gets of requests, and of every node's metrics."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "transformers", "openai", "hypercorn", "opentelemetry.sdk", "opentelemetry.proto"):
    pytest.importorskip(needed, reason=f"telemetry of a cluster needs {needed}")

from cluster import PATIENCE, Cluster, Service, cluster  # noqa: E402
from otlp_receiver import Receiver, plain, receiving  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT = "A page is written once. " * 12
TRACE, PARENT, STATE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "vendor=t61rcWkgMzE,other=1"
UNSAMPLED = "a" * 32
NODES = {"directory", "router", "prefill-1", "decode-1"}
CHAIN = ("request", "attempt", "answer", "fill prompt", "prefill", "compute")
WHERE = ("router", "router", "decode-1", "decode-1", "prefill-1", "prefill-1")
STATUS_ERROR = 2
ROOT = Path(__file__).parents[3]
METRIC = re.compile(r"asyncfabric_[a-z_]+")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def ask(client: Any, traceparent: str = "") -> str:
    """Ask for four tokens and return the header that names the router's span."""
    headers = {"traceparent": traceparent, "tracestate": STATE} if traceparent else {}
    answer = client.completions.with_raw_response.create(
        model="asyncfabric-random", prompt=PROMPT, max_tokens=4, extra_headers=headers
    )
    return str(answer.headers.get("traceresponse", ""))


def spans_of(receiver: Receiver, trace: str) -> dict[str, tuple[str, Any]]:
    """Return the spans of a trace by name, each with its node; `chunk` is there more than once."""
    with receiver.lock:
        return {
            span.name: (about["service.instance.id"], span)
            for about, span in receiver.spans
            if span.trace_id.hex() == trace
        }


@pytest.fixture
def exporting(tmp_path: Path) -> Iterator[tuple[Receiver, Cluster]]:
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        log = f"{tmp_path}/decisions"
        with cluster(tmp_path, "prefill-1", "decode-1", MODEL__EXPERTS="4", WEIGHTS__LOG=log) as made:
            yield receiver, made


def test_a_collector_and_the_dashboard_get_what_nodes_have(exporting: tuple[Receiver, Cluster]) -> None:
    check_traces_and_metrics(*exporting)
    check_dashboard(exporting[1])


def check_traces_and_metrics(receiver: Receiver, made: Cluster) -> None:
    """Of every node, those of requests with a context of the client's and without."""
    with made.client() as client:
        given = ask(client, f"00-{TRACE}-{PARENT}-01")
        new = ask(client)
        assert ask(client, f"00-{UNSAMPLED}-{PARENT}-00") == ""
    wanted = {*CHAIN, "decode", "stream", "chunk", "wait for pages"}
    until(lambda: spans_of(receiver, TRACE).keys() >= wanted, "the spans of the trace")
    until(lambda: spans_of(receiver, new[3:35]).keys() >= wanted, "the spans of a trace of ours")
    until(lambda: receiver.metrics.keys() == NODES, "metrics of each node")
    answered = 'asyncfabric_router_requests_total{endpoint="completions",status="200"}'
    count = made["router"].until(answered, lambda value: value == 3)
    until(lambda: requests_of(receiver) == count, "as many requests as /metrics has")

    spans = spans_of(receiver, TRACE)
    parent = PARENT
    for name, node in zip(CHAIN, WHERE, strict=True):
        where, span = spans[name]
        assert (where, span.parent_span_id.hex()) == (node, parent), name
        assert span.trace_state == STATE and span.end_time_unix_nano >= span.start_time_unix_nano
        assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 2 * PATIENCE
        parent = span.span_id.hex()
    assert spans["decode"][1].parent_span_id == spans["answer"][1].span_id
    assert spans["stream"][1].parent_span_id == spans["prefill"][1].span_id
    assert spans["chunk"][1].parent_span_id == spans["compute"][1].span_id
    assert given == f"00-{TRACE}-{spans['request'][1].span_id.hex()}-01"
    assert plain(spans["request"][1].attributes) | {"asyncfabric.request": ""} == {
        "asyncfabric.request": "",
        "asyncfabric.status": 200,
        "asyncfabric.prompt_tokens": len(PROMPT),
        "asyncfabric.tokens": 4,
        "asyncfabric.finish": "length",
    }
    assert all(span.status.code != STATUS_ERROR for _, span in spans.values())

    first = spans_of(receiver, new[3:35])["request"][1]
    assert (first.parent_span_id, first.span_id.hex()) == (b"", new[36:52]), "a trace that begins here has a root"
    assert spans_of(receiver, UNSAMPLED) == {}, "the client's decision holds"
    about = next(about for about, _ in receiver.spans if about["service.instance.id"] == "router")
    assert (about["service.name"], about["deployment.environment"]) == ("asyncfabric-router", "test")

    exported = receiver.metrics["decode-1"]
    assert {*exported} == families(made["decode-1"])
    seconds = receiver.metrics["router"]["asyncfabric_router_request_seconds"].histogram.data_points[0]
    assert (sum(seconds.bucket_counts), len(seconds.bucket_counts)) == (seconds.count, len(seconds.explicit_bounds) + 1)


def check_dashboard(made: Cluster) -> None:
    """It asks for what nodes have, and for all of it."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    made.nodes["trainer-1"] = trainer = made.service("trainer-1", made.settings, rank)
    made.started.append(trainer)
    made.start("coordinator", "rollout-1", "expert-1")
    trainer.receive()
    panels = json.loads((ROOT / "docs" / "grafana" / "asyncfabric.json").read_text())["panels"]
    asked = {name for panel in panels for one in panel.get("targets", ()) for name in METRIC.findall(one["expr"])}
    shown = [families(node) for node in made.nodes.values()]
    assert {name.removesuffix("_bucket") for name in asked} == set().union(*shown)


def families(node: Service) -> set[str]:
    """Return the names of what a node's `/metrics` has of ours."""
    typed = (line.split()[2] for line in node.get("/metrics").splitlines() if line.startswith("# TYPE asyncfabric_"))
    return {name for name in typed if not name.endswith("_created")}


def requests_of(receiver: Receiver) -> float:
    """Return how many requests were answered, as the router's last export has it."""
    metric = receiver.metrics["router"]["asyncfabric_router_requests_total"]
    assert metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2
    wanted = {"endpoint": "completions", "status": "200"}
    return float(next(one.as_double for one in metric.sum.data_points if plain(one.attributes) == wanted))
