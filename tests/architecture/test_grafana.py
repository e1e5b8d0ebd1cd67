"""The Grafana dashboard is what its generator writes, with each metric once. Running nodes: test_telemetry.py."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from house_tree import ROOT

FOLDER = ROOT / "docs" / "grafana"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_grafana", FOLDER / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_up_to_date() -> None:
    made = generator()
    assert (FOLDER / "asyncfabric.json").read_text() == made.dashboard(), "run `make docs`"
    panels = [one for one in json.loads(made.dashboard())["panels"] if one["type"] != "row"]
    assert {f"asyncfabric_{one['title']}" for one in panels} == {*made.defined_metrics()}
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels]
    assert len(set(places)) == len(panels) > 50 and all(one["description"] for one in panels)


def test_queries_of_each_kind() -> None:
    made = generator()
    chosen = '{job=~"$job",instance=~"$instance"}'
    metrics = made.defined_metrics()
    assert made.queries(metrics["asyncfabric_kv_free_pages"]) == {"{{instance}}": f"asyncfabric_kv_free_pages{chosen}"}
    (retries,) = made.queries(metrics["asyncfabric_router_retries_total"]).values()
    assert retries == f"sum by (instance, because) (rate(asyncfabric_router_retries_total{chosen}[$__rate_interval]))"
    passes = made.queries(metrics["asyncfabric_runner_pass_seconds"])
    assert set(passes) == {"p50 {{instance}}", "p99 {{instance}}"}
    assert all("_bucket{" in query for query in passes.values())
