"""`asyncfabric top` beside a training: the version of each node, how far behind it is, how the last updates ended."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from click.testing import CliRunner
from look_site import site

from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.look.rates import Sample, row_of, with_lags
from asyncfabric_services.look.reports import ReportedHealth

COMMITTED = {
    "version": 7,
    "outcome": "committed",
    "receivers": ["rollout-1/0", "rollout-2/0"],
    "seconds": 0.5,
    "prepare_s": 0.125,
    "write_s": 0.25,
    "verify_s": 0.3,
    "decide_s": 0.0625,
    "sent_bytes": 8_920_000,
    "saved_bytes": 0,
    "links": [{"why": "not shown"}],
    "ago_s": 61.0,
}
ABORTED = {"version": 8, "outcome": "aborted", "reason": "rollout-3/0 is [gone]", "ago_s": 2.0}
NODES = {
    "coordinator": {"asyncfabric_weights_committed_version": 7},
    "trainer": {"asyncfabric_weights_published_version": 7},
    "rollout": {"asyncfabric_rollout_version": 4, "asyncfabric_rollout_tokens_total": 10},
}


def top(updates: list[dict[str, Any]], *options: str) -> str:
    with ExitStack() as stack:
        asked = []
        for role, metrics in NODES.items():
            health = {"state": "ready", "role": role, "name": f"the {role}"}
            more = {"updates": updates} if role == "coordinator" else {}
            node = stack.enter_context(site(look={"health": health, "metrics": metrics} | more))
            asked += ["--node", node.url]
        found = CliRunner().invoke(
            asyncfabric, ["top", "--once", "--interval", "1ms", *asked, *options], standalone_mode=False
        )
    assert found.exception is None, found
    return found.stdout


def test_each_node_has_its_version_and_what_it_lacks() -> None:
    rows = {row["role"]: row for row in map(json.loads, top([], "--json").splitlines())}
    assert {role: (row["version"], row["versions_behind"]) for role, row in rows.items()} == {
        "coordinator": (7, None),
        "trainer": (7, 0),
        "rollout": (4, 3),
    }
    assert rows["rollout"]["tokens_per_s"] == 0 and rows["trainer"]["tokens_per_s"] is None


def test_the_last_updates_are_reported_in_a_line_each() -> None:
    older = [COMMITTED | {"version": 5}, ABORTED | {"version": 6}]
    stated = " ".join(top([*older, COMMITTED, ABORTED]).split())
    assert (
        "the coordinator: version 7 was committed 1.02 min ago: 2 receivers in 500 ms (prepare 125 ms, write 250 ms, "
        "verify 300 ms, decide 62.5 ms), 8.92 MB sent the coordinator: version 8 was aborted 2 s ago: "
        "rollout-3/0 is [gone]"
    ) in stated
    assert "behind" in stated and "pages held" not in stated, "no node has pages"
    assert "version 5" not in stated and "version 6" not in stated
    assert ", 8.92 MB sent, 3 kB saved by codings" in " ".join(top([COMMITTED | {"saved_bytes": 3000}]).split())
    rows = [json.loads(line) for line in top([COMMITTED, ABORTED], "--json").splitlines()]
    reported = [row["last_updates"] for row in rows if row["role"] == "coordinator"]
    assert reported == [[{name: value for name, value in COMMITTED.items() if name != "links"}, ABORTED]]


def test_who_is_behind_is_not_stated_beside_two_trainings() -> None:
    def row(role: str, version: float) -> dict[str, Any]:
        names = {"coordinator": "weights_committed_version", "rollout": "rollout_version"}
        return row_of(None, Sample(1.0, ReportedHealth(role=role), {f"asyncfabric_{names[role]}": version}))

    def behind(*rows: dict[str, Any]) -> list[float | None]:
        return [one["versions_behind"] for one in with_lags(rows)]

    assert behind(row("coordinator", 7), row("rollout", 0)) == [None, 7]
    assert behind(row("coordinator", 7), row("rollout", 8)) == [None, 0], "it was asked a moment later"
    assert behind(row("coordinator", 7), row("coordinator", 9), row("rollout", 5)) == [None, None, None]
    assert behind(row("rollout", 5)) == [None]
