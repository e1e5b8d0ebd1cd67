"""What the page shows of each node, what differs between two moments, and which events follow from that. Pure.

Rows are plain values for JSON. Texts of nodes are cut and never markup: the page puts them in as text.
DB-1: a moment with the difference to a later one applied equals the later one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Annotated, Any

from msgspec import Meta, Struct, convert

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.dashboard.history import RETRIED, NodeHistory
from asyncfabric_services.look.rates import Sample, row_of, with_lags
from asyncfabric_services.look.reports import MOST_INTEGER, ReportedHealth, ReportedWait

MOST_TEXT = 200
MOST_WAITS = 20  # of a node that are shown; the others are counted
MOST_RAILS = 256  # of a node

Row = dict[str, Any]
Rows = Mapping[str, Row]


class ShownUpdate(Struct, frozen=True, omit_defaults=True):
    """An update of weights that ended, as a coordinator reports it."""

    version: Annotated[int, Meta(ge=0, le=MOST_INTEGER)]
    outcome: str
    reason: str = ""
    receivers: list[str] = []
    seconds: float = 0.0
    prepare_s: float = 0.0
    write_s: float = 0.0
    verify_s: float = 0.0
    decide_s: float = 0.0
    sent_bytes: Annotated[int, Meta(ge=0, le=MOST_INTEGER)] = 0
    ago_s: Annotated[float, Meta(ge=0, le=1e10)] = 0.0


def rows_of(members: Sequence[Mapping[str, str]], histories: Mapping[str, NodeHistory]) -> dict[str, Row]:
    """Return the rows of all members of the directory by name; `histories` are by incarnation."""
    found = [(member, histories.get(member["incarnation"], NodeHistory())) for member in members]
    looked = with_lags([_looked(member, history) for member, history in found])
    return {member["name"]: _row(member, history, look) for (member, history), look in zip(found, looked, strict=True)}


def _looked(member: Mapping[str, str], history: NodeHistory) -> Row:
    return row_of(history.before, history.now or Sample(0.0, ReportedHealth())) | {"role": member["role"]}


def _row(member: Mapping[str, str], history: NodeHistory, look: Row) -> Row:
    state, note = member["state"], ""
    if history.now is not None:
        health = history.now.health
        state = "draining" if state == "draining" else health.state
        note = health.reason or "; ".join(health.missing.values())
    if history.trouble or not member["http"]:
        state, note = "silent", history.trouble or "where its HTTP endpoint is was not reported"
    waits = history.now.why if history.now else ()
    pages = [look["held_pages"], look["free_pages"], look["quarantined_pages"]]
    firsts = [history.first_token_s(share) for share in (0.5, 0.99)]
    return {
        "role": member["role"],
        "state": _cut(state),
        "note": _cut(note),
        "requests": look["requests"],
        "answered": _short(history.answered_per_s()),
        "first": [_short(seconds) for seconds in firsts] if firsts[0] is not None else None,
        "tokens": _short(look["tokens_per_s"]),
        "sent": _short(look["sent_bytes_per_s"]),
        "version": look["version"],
        "behind": _short(look["versions_behind"]),
        "pages": [count or 0 for count in pages] if any(count is not None for count in pages) else None,
        "retried": history.total(RETRIED),
        "rails": _rails(history),
        "waits": [_wait(wait) for wait in sorted(waits, key=lambda wait: -(wait.for_s or 0))[:MOST_WAITS]],
        "waiting": len(waits),
        "on": Counter(_cut(name) for wait in waits for name in wait.missing_from),
        "updates": list(_updates(look["last_updates"])),
    }


def _rails(history: NodeHistory) -> dict[str, list[Any]]:
    """Return bytes per second, provider, ops in flight and state by peer; the fastest where there are too many."""
    rates = history.rail_rates()
    rails: dict[str, list[Any]] = {}
    for peer in history.now.peers if history.now else ():
        if peer.plane == "fabric" and peer.state != "closed":
            rate = _short(rates.get(peer.peer, 0.0))
            rails[_cut(peer.peer)] = [rate, _cut(peer.provider), peer.ops_in_flight, _cut(peer.state)]
    return dict(sorted(rails.items(), key=lambda rail: -rail[1][0])[:MOST_RAILS])


def _wait(wait: ReportedWait) -> list[Any]:
    missing = [_cut(name) for name in wait.missing_from[:8]]
    return [_cut(wait.what), _cut(wait.waits_for), wait.have, wait.need, missing, round(wait.for_s or 0)]


def _updates(rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for row in rows:
        try:
            update = convert(row, ShownUpdate)
        except UNREADABLE:
            continue
        stages = [round(each, 4) for each in (update.prepare_s, update.write_s, update.verify_s, update.decide_s)]
        yield {
            "version": update.version,
            "outcome": _cut(update.outcome),
            "reason": _cut(update.reason),
            "receivers": len(update.receivers),
            "seconds": round(update.seconds, 4),
            "stages": stages,
            "sent": update.sent_bytes,
            "at": round(time.time() - update.ago_s),
        }


def difference(before: Rows, after: Rows) -> Row:
    """Return the fields that changed, by node, and who is gone; empty when nothing is different."""
    changed = {}
    for name, row in after.items():
        old = before.get(name, {})
        fields = {field: value for field, value in row.items() if field not in old or old[field] != value}
        if fields:
            changed[name] = fields
    gone = [name for name in before if name not in after]
    return ({"set": changed} if changed else {}) | ({"gone": gone} if gone else {})


def applied(before: Rows, change: Mapping[str, Any]) -> dict[str, Row]:
    """Return the rows after a change, as the page computes them."""
    kept = {name: row for name, row in before.items() if name not in change.get("gone", ())}
    return kept | {name: kept.get(name, {}) | fields for name, fields in change.get("set", {}).items()}


def events_between(before: Rows, after: Rows) -> Iterator[tuple[str, str, str]]:
    """Return kind, node and text of what nodes went through that the directory does not know."""
    for name, row in after.items():
        old = before.get(name)
        if old is None:
            continue
        if row["state"] != old["state"] and row["state"] in ("silent", "failed", "waiting"):
            yield row["state"], name, row["note"]
        again = (row["retried"] or 0) - (old["retried"] or 0)
        if old["retried"] is not None and again > 0:
            yield "retries", name, f"{again:g} attempt{'s' * (again != 1)} of requests made again"
        known = {(update["version"], update["outcome"]) for update in old["updates"]}
        for update in row["updates"]:
            # A node that was not looked at before reports updates of long ago.
            if old["version"] is not None and (update["version"], update["outcome"]) not in known:
                yield update["outcome"], name, _update_text(update)


def _update_text(update: Row) -> str:
    if update["reason"]:
        return f"version {update['version']}: {update['reason']}"
    return f"version {update['version']}: {update['receivers']} receivers in {update['seconds']:.3g} s"


def _short(value: float | None) -> float | None:
    """Return three digits: more would be another value at each look."""
    return None if value is None or not isfinite(value) else float(f"{value:.3g}")


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}\N{HORIZONTAL ELLIPSIS}"
