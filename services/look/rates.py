"""Rates of nodes from two samples of what they report. Pure; the sampling is in `sampling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncfabric_services.look.reports import NodeReport, ReportedHealth, ReportedPeer, ReportedWait

FABRIC = '{fabric="fabric"}'


@dataclass(frozen=True, slots=True)
class Sample:
    """What a node reported at one moment.

    Attributes:
        at: the moment, in seconds on one clock of the asker.
        health: as `/health` answers.
        metrics: values by name with labels.
        why: its waits.
        peers: of its fabric and of its control plane.
        updates: of a coordinator.
    """

    at: float
    health: ReportedHealth
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: Sequence[ReportedWait] = ()
    peers: Sequence[ReportedPeer] = ()
    updates: Sequence[NodeReport] = ()


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
        "node": now.health.name,
        "role": now.health.role,
        "state": now.health.state,
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
        "waits": len(now.why),
        "held_pages": value("asyncfabric_kv_held_pages"),
        "free_pages": value("asyncfabric_kv_free_pages"),
        "quarantined_pages": value("asyncfabric_kv_quarantined_pages"),
        "last_updates": last_updates(now.updates),
    }


def last_updates(updates: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the last update that was committed and the last one that was aborted, without their links."""
    last = {row["outcome"]: row for row in updates if isinstance(row.get("outcome"), str)}
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
