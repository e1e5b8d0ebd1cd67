"""Writes asyncfabric.json, a Grafana dashboard with a panel for each metric that the sources define.

`make docs` runs it. Metrics are read from the syntax of the sources, so that none needs to be listed again: calls of
`gauge`, `histogram` and `BoundedCounter`, and the tables of a fabric. Nothing is imported and nothing runs.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROWS = {
    "Requests": ("router_",),
    "Nodes": ("directory_", "node_"),
    "KvCache": ("kv_", "prefill_", "runner_"),
    "Weights": ("weights_", "training_", "rollout_"),
    "Experts": ("expert_",),
    "Fabric": ("",),
}
"""Row of the dashboard -> how the names of its metrics begin; the first row that fits takes a metric."""
ROLES = ("prefill", "decode")
"""What the one variable part of a subject stands for."""
FABRIC_TABLES = {"COUNTERS": ("counter", "_total"), "GAUGES": ("gauge", "")}
COLUMNS, WIDE, HIGH = 3, 8, 7
SOURCE = {"type": "prometheus", "uid": "${source}"}


class DefinedMetric(NamedTuple):
    """A metric: `kind` is counter, gauge or histogram, `labels` are those besides the node's."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()


def defined_metrics() -> dict[str, DefinedMetric]:
    """Return every metric of nodes by name, in the order of their names."""
    found = [one for path in sorted((ROOT / "services").rglob("*.py")) for one in _of_services(path)]
    found += _of_fabric(ast.parse((ROOT / "asyncfabric/observe/metrics.py").read_text()))
    return {one.name: one for one in sorted(found)}


def _of_services(path: Path) -> Iterator[DefinedMetric]:
    tree = ast.parse(path.read_text())
    named = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 4:
            continue
        kind = {"gauge": "gauge", "histogram": "histogram", "BoundedCounter": "counter"}.get(node.func.id)
        if kind is None:
            continue
        labels = [keyword.arg or "" for keyword in node.keywords if kind == "counter"]
        labels += ast.literal_eval(node.args[4]) if kind == "gauge" and len(node.args) > 4 else ()
        for role in ROLES if isinstance(node.args[1], ast.JoinedStr) else ("",):
            subject, unit, text = (_text(argument, named, role) for argument in node.args[1:4])
            yield DefinedMetric(f"asyncfabric_{subject}_{unit}", kind, text, tuple(labels))


def _text(node: ast.expr, named: dict[str, Any], role: str) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else role for part in node.values)
    return str(named[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node))


def _of_fabric(tree: ast.Module) -> Iterator[DefinedMetric]:
    for node in tree.body:
        table = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and table in FABRIC_TABLES:
            kind, suffix = FABRIC_TABLES[table]
            for name, text in ast.literal_eval(node.value.args[0]).values():
                yield DefinedMetric(f"asyncfabric_{name}{suffix}", kind, text)
    for call in ast.walk(tree):
        named = isinstance(call, ast.Call) and ast.unparse(call.func) == "GaugeMetricFamily"
        if named and isinstance(call.args[0], ast.Constant):
            labels = tuple(label for label in ast.literal_eval(call.keywords[0].value) if label != "fabric")
            yield DefinedMetric(str(call.args[0].value), "gauge", str(ast.literal_eval(call.args[1])), labels)


def queries(metric: DefinedMetric) -> dict[str, str]:
    """Return legend -> PromQL of a metric."""
    chosen = '{job=~"$job",instance=~"$instance"}'
    by = ", ".join(("instance", *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    if metric.kind == "counter":
        return {legend: f"sum by ({by}) (rate({metric.name}{chosen}[$__rate_interval]))"}
    if metric.kind == "histogram":
        rate = f"sum by (le, {by}) (rate({metric.name}_bucket{chosen}[$__rate_interval]))"
        return {f"p{part} {legend}": f"histogram_quantile(0.{part}, {rate})" for part in (50, 99)}
    since = "time() - " if metric.name.endswith("_timestamp_seconds") else ""
    return {legend: f"{since}{metric.name}{chosen}"}


def _panel(metric: DefinedMetric, x: int, y: int) -> dict[str, Any]:
    bare = metric.name.removesuffix("_total")
    unit = "bytes" if bare.endswith("bytes") else "s" if bare.endswith("seconds") else "short"
    if metric.kind == "counter":
        unit = {"bytes": "Bps", "s": "percentunit"}.get(unit, "ops")
    return {
        "type": "timeseries",
        "title": metric.name.removeprefix("asyncfabric_"),
        "description": metric.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDE, "h": HIGH},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + number), "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(queries(metric).items())
        ],
    }


def panels() -> Iterator[dict[str, Any]]:
    """Yield the rows and their panels, from top to bottom."""
    left, y = defined_metrics(), 0
    for row, prefixes in ROWS.items():
        mine = [name for name in left if name.removeprefix("asyncfabric_").startswith(prefixes)]
        yield {
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        }
        for number, name in enumerate(mine):
            yield _panel(left.pop(name), number % COLUMNS * WIDE, y + 1 + number // COLUMNS * HIGH)
        y += 1 + -(-len(mine) // COLUMNS) * HIGH


def dashboard() -> str:
    """Return the text of asyncfabric.json: one panel on each line."""
    listed = ",\n  ".join(json.dumps({"id": number, **panel}) for number, panel in enumerate(panels(), 1))
    variables = [{"name": "source", "type": "datasource", "query": "prometheus", "label": "data source"}]
    for name, of in (("job", "up"), ("instance", 'asyncfabric_node_inside_requests{job=~"$job"}')):
        every = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
        query = f"label_values({of}, {name})"
        variables.append({"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, **every})
    about = {
        "uid": "asyncfabric",
        "title": "asyncfabric",
        "tags": ["asyncfabric"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
    }
    return f'{json.dumps(about, indent=1)[:-2]},\n "panels": [\n  {listed}\n ]\n}}\n'


if __name__ == "__main__":
    (HERE / "asyncfabric.json").write_text(dashboard())
