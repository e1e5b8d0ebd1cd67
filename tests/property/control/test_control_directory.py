"""The directory's table and views under random nodes, leases, losses, missed news and restarts (DI-1, DI-2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.control.directory import Decision, DirectoryTable, DirectoryView, Node, NodeChange
from asyncfabric.control.messages import Identity

LEASE_NS = 1000
KINDS = (
    "register",
    "register",
    "register",
    "renew",
    "drain",
    "leave",
    "lose",
    "time",
    "news",
    "news",
    "miss",
    "restart",
)
Step = tuple[str, int, int]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 3)), min_size=5, max_size=80)


def identity(a: int, b: int) -> Identity:
    return Identity("nmo"[a % 3], 1 + b)


class Cluster:
    """A table, the view of a node, and what the view has reported to its watchers."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.table, self.settles_ns = DirectoryTable(LEASE_NS), LEASE_NS
        self.view = DirectoryView()
        self.reported: dict[str, Node] = {}
        self.deadlines: dict[Identity, int] = {}

    def do(self, step: Step) -> None:
        kind, a, b = step
        who, before = identity(a, b), self.table.epoch
        decision = Decision()
        match kind:
            case "register":
                decision = self.table.register(who, "role", f"at {a}", {})
                if not decision.is_empty or self.table.renew(who, self.now_ns):
                    self.deadlines[who] = self.now_ns + LEASE_NS
            case "renew":
                if self.table.renew(who, self.now_ns):
                    self.deadlines[who] = self.now_ns + LEASE_NS
            case "drain":
                decision = self.table.drain(who)
            case "leave":
                decision = self.table.leave(who)
            case "lose":
                decision = self.table.lose(who, "gone")
            case "time":
                self.now_ns += 150 * (a + 1)
                decision = self.table.expire(self.now_ns)
                assert all(self.deadlines[change.node.identity] <= self.now_ns for change in decision.changes)
                assert self.table.apply(decision, self.now_ns)
                assert all(self.deadlines[node.identity] > self.now_ns for node in self.table.nodes.values())
                if self.now_ns >= self.settles_ns:
                    assert self.table.apply(self.table.settle(), self.now_ns)
                return
            case "news":
                self.catch_up()
            case "restart":
                self.table, self.settles_ns = DirectoryTable(LEASE_NS), self.now_ns + LEASE_NS
                self.take_snapshot()
                return
        assert self.table.apply(decision, self.now_ns)
        assert [change.epoch for change in decision.changes] == list(range(before + 1, self.table.epoch + 1)), "DI-1"

    def catch_up(self) -> None:
        changes = self.table.since(self.view.epoch)
        news = None if changes is None else self.view.apply(changes)
        if news is None:
            self.take_snapshot()
        else:
            self.apply_news(news)
        if self.table.settled:
            self.apply_news(self.view.settle())

    def take_snapshot(self) -> None:
        settled = self.table.settled
        before = dict(self.view.nodes)
        self.apply_news(self.view.replace(self.table.epoch, self.table.nodes.values(), settled=settled))
        if not settled:
            assert before.keys() <= self.view.nodes.keys(), "DI-2: forgotten before it could register"

    def apply_news(self, news: list[NodeChange]) -> None:
        for change in news:
            name = change.node.identity.name
            if change.kind in ("left", "lost"):
                assert self.reported.pop(name).identity == change.node.identity
            else:
                assert (name in self.reported) == (change.kind != "joined"), f"{change.kind} of {name}"
                self.reported[name] = change.node
        assert self.reported == self.view.nodes, "watchers were reported something else than the view"


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=200)
def test_a_view_that_received_all_equals_the_table(trace: list[Step]) -> None:
    cluster = Cluster()
    for step in trace:
        cluster.do(step)
    cluster.table.apply(cluster.table.settle(), cluster.now_ns)
    cluster.catch_up()
    assert cluster.view.nodes == cluster.table.nodes
    assert len({node.identity.name for node in cluster.view.nodes.values()}) == len(cluster.view.nodes)


def test_who_fell_behind_gets_a_snapshot_and_who_did_not_gets_changes() -> None:
    table = DirectoryTable(LEASE_NS)
    for number in range(2000):
        table.apply(table.register(Identity(f"n{number}", 1), "role", "", {}), 0)
    assert table.since(500) is None and table.since(3000) is None
    assert [change.epoch for change in table.since(1990) or []] == list(range(1991, 2001))
    assert table.since(2000) == [] and len(table.since(2000 - 1024) or []) == 1024


def test_a_later_incarnation_replaces_and_an_earlier_one_changes_nothing() -> None:
    table = DirectoryTable(LEASE_NS)
    assert table.apply(table.register(Identity("n", 2), "role", "", {}), 0)
    assert table.register(Identity("n", 1), "role", "", {}).is_empty
    assert table.lose(Identity("n", 1), "late news").is_empty and not table.renew(Identity("n", 1), 0)
    assert "a role node" in table.objection(Identity("n", 3), "other")
    assert table.register(Identity("n", 3), "other", "", {}).is_empty
    assert table.register(Identity("n", 3), "role", "", {}, key="of another").is_empty
    changes = table.register(Identity("n", 3), "role", "", {}).changes
    assert [(one.kind, one.node.identity.incarnation) for one in changes] == [("lost", 2), ("joined", 3)]
