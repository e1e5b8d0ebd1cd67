"""Rates of nodes from two samples of their metrics. Pure; the sampling is done by the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncfabric_services.look.tables import NodeReport

FABRIC = '{fabric="fabric"}'


@dataclass(frozen=True, slots=True)
class Sample:
    """What a node reported at one moment.

    Attributes:
        at: the moment, in seconds on one clock of the asker.
        health: the answer of `/health`.
        metrics: values by name with labels.
        waits: lines of `/why`.
        updates: rows of `/updates`, of a coordinator.
    """

    at: float
    health: NodeReport
    metrics: dict[str, float] = field(default_factory=dict)
    waits: int = 0
    updates: Sequence[NodeReport] = ()


def parsed(text: str) -> dict[str, float]:
    """Return our metrics of an exposition, by name with labels; lines that make no sense are passed over."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("asyncfabric_"):
            try:
                found[name] = float(value)
            except ValueError:
                continue
    return found


def row_of(before: Sample | None, now: Sample) -> dict[str, Any]:
    """Return what `top` shows of a node; None for what it has not, and for rates of its first sample."""

    def value(*names: str) -> float | None:
        return next((now.metrics[name] for name in names if name in now.metrics), None)

    def rate(*names: str) -> float | None:
        known = [name for name in names if name in now.metrics]
        if before is None or not known or now.at <= before.at:
            return None
        grown = [now.metrics[name] - before.metrics.get(name, 0.0) for name in known]
        if min(grown) < 0:
            return None  # another life of the node: its counters began anew
        return sum(grown) / (now.at - before.at)

    return {
        "node": now.health.get("name", ""),
        "role": now.health.get("role", ""),
        "state": now.health.get("state", ""),
        "peers": value('asyncfabric_peers{fabric="fabric",state="connected"}'),
        "sent_bytes_per_s": rate(f"asyncfabric_written_bytes_total{FABRIC}"),
        "ops_per_s": rate(f"asyncfabric_completed_ops_total{FABRIC}"),
        "tokens_per_s": rate(
            'asyncfabric_router_tokens_total{kind="answer"}',
            "asyncfabric_prefill_computed_tokens_total",
            'asyncfabric_runner_computed_tokens_total{kind="prompt"}',
            'asyncfabric_runner_computed_tokens_total{kind="answer"}',
            "asyncfabric_rollout_tokens_total",
        ),
        "version": value(
            "asyncfabric_weights_committed_version",
            "asyncfabric_weights_published_version",
            "asyncfabric_rollout_version",
        ),
        "versions_behind": None,
        "requests": value("asyncfabric_node_inside_requests", "asyncfabric_router_inside_requests"),
        "waits": now.waits,
        "held_pages": value("asyncfabric_kv_held_pages"),
        "free_pages": value("asyncfabric_kv_free_pages"),
        "quarantined_pages": value("asyncfabric_kv_quarantined_pages"),
        "last_updates": last_updates(now.updates),
    }


def last_updates(updates: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the last update that was committed and the last one that was aborted, without their links."""
    last = {str(row.get("outcome", "")): row for row in updates}
    return [
        {name: value for name, value in last[outcome].items() if name != "links"}
        for outcome in ("committed", "aborted")
        if outcome in last
    ]


def with_lags(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, with how many versions each is behind what was decided, where one coordinator states that."""
    decided = [row["version"] for row in rows if row["role"] == "coordinator" and row["version"] is not None]
    if len(decided) != 1:
        return list(rows)
    return [
        row | {"versions_behind": max(0.0, decided[0] - row["version"])}
        if row["role"] in ("trainer", "rollout") and row["version"] is not None
        else row
        for row in rows
    ]
