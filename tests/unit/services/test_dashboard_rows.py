"""What the dashboard shows of nodes: rates, quantiles, states, texts that are cut, events; and DB-1 of differences."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric_services.dashboard.feed import MOST_EVENTS, MOST_KEPT, NOWHERE, DashboardFeed
from asyncfabric_services.dashboard.history import NodeHistory, quantile
from asyncfabric_services.dashboard.rows import MOST_TEXT, MOST_WAITS, applied, difference, events_between, rows_of
from asyncfabric_services.look.rates import Sample
from asyncfabric_services.look.reports import LOOK, ReportedHealth, ReportedPeer, ReportedWait

FIELDS = st.fixed_dictionaries(
    {"state": st.sampled_from(["ready", "silent"]), "sent": st.none() | st.floats(0, 9), "rails": st.just({})}
)
ROWS = st.dictionaries(st.sampled_from("abcdef"), FIELDS)


@given(ROWS, ROWS)
def test_a_difference_applied_to_the_earlier_gives_the_later(before: Any, after: Any) -> None:
    change = difference(before, after)
    assert applied(before, change) == after
    assert bool(change) == (before != after), "what is the same is not sent"


def moments(stream: bytes) -> list[tuple[str, str, dict[str, Any]]]:
    """Return kind, id and body of each message."""
    found = []
    for message in stream.decode().split("\n\n"):
        if message.startswith("event"):
            fields = dict(line.split(": ", 1) for line in message.split("\n"))
            found.append((fields["event"], fields["id"], json.loads(fields["data"])))
    return found


@given(st.lists(st.tuples(ROWS, st.booleans()), max_size=3 * MOST_KEPT))
def test_viewers_of_any_speed_see_what_there_is(steps: list[tuple[Any, bool]]) -> None:
    feed, position, seen = DashboardFeed(), NOWHERE, dict[str, Any]()
    for rows, looks in [*steps, ({}, True)]:
        feed.publish(rows)
        if not looks:
            continue
        due, position = feed.due(position)
        for kind, _, body in moments(due):
            seen = body["nodes"] if kind == "snapshot" else applied(seen, body)
        assert seen == rows


def test_who_comes_back_goes_on_and_who_is_far_behind_begins_anew() -> None:
    feed = DashboardFeed()
    feed.publish({"a": {"n": 0}})
    ((kind, first, _),) = moments(feed.due(NOWHERE)[0])
    assert kind == "snapshot"
    feed.publish({"a": {"n": 1}})
    (change,) = moments(feed.due(feed.position_of(first))[0])
    assert change[0] == "change" and change[2]["set"] == {"a": {"n": 1}}
    for number in range(2 * MOST_KEPT):
        feed.publish({"a": {"n": -number}})
    assert [kind for kind, _, _ in moments(feed.due(feed.position_of(first))[0])] == ["snapshot"]
    for strange in ("", "x", DashboardFeed()._message("change", {}).decode(), first + "9" * 30, f"{first[:9]}-1"):
        assert moments(feed.due(feed.position_of(strange))[0])[0][0] == "snapshot", strange


def test_events_are_kept_for_those_who_come_later_and_no_more_than_that() -> None:
    feed = DashboardFeed()
    for number in range(MOST_EVENTS + 5):
        feed.note("joined", f"n{number}", "prefill")
    feed.publish({})
    feed.note("left", "n0", "it left")
    feed.publish({})
    (_, _, whole), (_, _, change) = moments(feed.due(NOWHERE)[0] + feed.due(1)[0])
    assert len(whole["events"]) == MOST_EVENTS and whole["events"][-1]["kind"] == "left"
    assert [event["node"] for event in change["events"]] == ["n0"]


def sample(at: float, sent: int = 0, health: ReportedHealth | None = None, **more: Any) -> Sample:
    peers = [
        ReportedPeer("fabric", "decode-1", "connected", "tcp", sent, 2),
        ReportedPeer("control", "decode-1", "ready"),
    ]
    return Sample(at, health or ReportedHealth("prefill-1", "prefill", "ready"), **({"peers": peers} | more))


MEMBER = {"name": "prefill-1", "role": "prefill", "state": "ready", "http": "http://a:1", "incarnation": "1"}


def row_of(*samples: Sample, trouble: str = "", **member: str) -> dict[str, Any]:
    history = NodeHistory()
    for one in samples:
        history.take(one)
    history.trouble = trouble
    return rows_of([MEMBER | member], {"1": history})["prefill-1"]


def test_rails_have_their_rates_and_the_control_plane_is_none() -> None:
    assert row_of(sample(1.0))["rails"] == {"decode-1": [0.0, "tcp", 2, "connected"]}
    assert row_of(sample(1.0, 1000), sample(3.0, 21_234))["rails"] == {"decode-1": [10_100.0, "tcp", 2, "connected"]}
    assert row_of(sample(1.0, 1000), sample(3.0, 0))["rails"]["decode-1"][0] == 0, "a new life of the peer"


@pytest.mark.parametrize(
    ("member", "health", "trouble", "expected"),
    [
        ({}, ReportedHealth(state="ready"), "", ("ready", "")),
        ({"state": "draining"}, ReportedHealth(state="ready"), "", ("draining", "")),
        ({}, ReportedHealth(state="waiting", missing={"directory": "no session"}), "", ("waiting", "no session")),
        ({}, ReportedHealth(state="failed", reason="refused"), "", ("failed", "refused")),
        ({}, ReportedHealth(state="ready"), "refused", ("silent", "refused")),
        ({"http": ""}, None, "", ("silent", "where its HTTP endpoint is was not reported")),
        ({}, None, "", ("ready", "")),
    ],
)
def test_states_are_of_who_knows_best(
    member: dict[str, str], health: ReportedHealth | None, trouble: str, expected: tuple[str, str]
) -> None:
    row = row_of(*([sample(1.0, health=health)] if health else []), trouble=trouble, **member)
    assert (row["state"], row["note"]) == expected


def test_a_node_that_is_late_once_is_not_silent_and_one_that_refuses_is() -> None:
    history = NodeHistory()
    history.take(sample(1.0))
    history.miss("late", late=True)
    assert (history.missed, history.trouble) == (1, "")
    history.miss("late", late=True)
    assert history.trouble == "late"
    history.take(sample(2.0))
    assert (history.missed, history.trouble) == (0, "")
    history.miss("refused", late=False)
    assert history.trouble == "refused"


def test_waits_are_the_longest_and_all_are_counted_by_whom_they_wait_for() -> None:
    waits = [ReportedWait("w" * 999, "pages", 1, 2, ["decode-1"], float(number)) for number in range(MOST_WAITS + 5)]
    row = row_of(sample(1.0, why=waits))
    assert (len(row["waits"]), row["waiting"], row["on"]) == (MOST_WAITS, MOST_WAITS + 5, {"decode-1": MOST_WAITS + 5})
    assert row["waits"][0][5] == MOST_WAITS + 4 and len(row["waits"][0][0]) == MOST_TEXT


def test_first_tokens_are_those_of_the_last_seconds() -> None:
    def firsts(*counts: int) -> dict[str, float]:
        bounds = ("0.1", "0.2", "+Inf")
        name = 'asyncfabric_router_first_token_seconds_bucket{le="%s"}'
        return {name % bound: count for bound, count in zip(bounds, counts, strict=True)}

    assert row_of(sample(1.0, metrics=firsts(5, 9, 9)))["first"] is None
    assert row_of(sample(1.0, metrics=firsts(5, 9, 9)), sample(2.0, metrics=firsts(5, 19, 19)))["first"] == [
        0.15,
        0.199,
    ]
    assert row_of(*(sample(at, metrics=firsts(5, 9, 9)) for at in (1.0, 20.0, 32.0)))["first"] is None
    assert quantile(0.5, {}, {0.1: 0.0, float("inf"): 4.0}) == 0.1, "beyond the last bound nobody knows more"
    assert quantile(0.5, {}, {}) is None


def test_updates_of_a_coordinator_are_shown_and_strange_ones_are_not() -> None:
    good = {"version": 7, "outcome": "committed", "receivers": ["r"], "seconds": 0.5, "ago_s": 1.0, "links": [1]}
    strange = {"version": "7", "outcome": "aborted"}
    row = row_of(sample(1.0, updates=[good, strange, {"outcome": ["x"]}, {}]))
    assert [(update["version"], update["outcome"], update["receivers"]) for update in row["updates"]] == [
        (7, "committed", 1)
    ]


def test_numbers_that_json_does_not_know_do_not_reach_the_page() -> None:
    metrics = {"asyncfabric_router_retries_total{a}": 1e308, "asyncfabric_router_retries_total{b}": 1e308}
    grown = {"asyncfabric_rollout_tokens_total": 1.7e308}
    row = row_of(
        sample(1.0, metrics=grown | {"asyncfabric_rollout_tokens_total": 0}),
        sample(1.0 + 1e-9, metrics=grown | metrics),
    )
    assert row["tokens"] is None and row["retried"] is None
    json.dumps(row, allow_nan=False)
    for hostile in ('{"health":{},"metrics":{"a":1e999}}', '{"health":{},"metrics":{"a":NaN}}', '{"health":[]}'):
        with pytest.raises(ValueError, match=r"range|malformed|Expected"):
            LOOK.decode(hostile)


def test_events_are_what_the_directory_does_not_know() -> None:
    retries, version = "asyncfabric_router_retries_total{}", "asyncfabric_weights_committed_version"
    update = {"version": 7, "outcome": "committed", "receivers": ["a", "b"], "seconds": 0.25}

    def rows(count: int, trouble: str = "", updates: Any = ()) -> dict[str, Any]:
        return {"n": row_of(sample(1.0, metrics={retries: count, version: 6}, updates=updates), trouble=trouble)}

    assert list(events_between({}, rows(3))) == [], "what was before anybody looked is no event"
    assert list(events_between({"n": row_of()}, rows(3, updates=[update]))) == []
    assert list(events_between(rows(3), rows(3))) == []
    assert list(events_between(rows(3), rows(5))) == [("retries", "n", "2 attempts of requests made again")]
    assert list(events_between(rows(3), rows(3, "refused"))) == [("silent", "n", "refused")]
    assert list(events_between(rows(3, "refused"), rows(3))) == []
    assert list(events_between(rows(3), rows(3, "", [update]))) == [
        ("committed", "n", "version 7: 2 receivers in 0.25 s")
    ]
