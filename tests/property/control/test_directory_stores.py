"""Two directories over one store: decisions that race, directories that end, start again or stand still (DI-1)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from asyncfabric.control.directory import Decision, DirectoryView, Node, NodeChange
from asyncfabric.control.messages import Identity
from asyncfabric.control.stores import MemoryStore, SharedTable, log

LEASE_S = 9.0
KINDS = (
    "register",
    "register",
    "register",
    "both",
    "both",
    "drain",
    "leave",
    "lose",
    "time",
    "news",
    "news",
    "restart",
)
Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(0, 5), st.integers(0, 3)), min_size=5, max_size=60
)


class OneOfTwo:
    """One directory without its link: the table, and all that it was reported."""

    def __init__(self, store: MemoryStore, name: str, incarnation: int, *, secret: bytes | None = b"s" * 32) -> None:
        self.me = Identity(name, incarnation)
        self.history: list[NodeChange] = []
        self.shared = SharedTable(
            store, self.me, int(LEASE_S * 1e9), secret, applied=self.take, begun=self.history.clear
        )

    def take(self, decision: Decision) -> None:
        self.history += decision.changes

    async def catch_up(self) -> None:
        await self.shared._until_done(self.shared._catch_up)


class Pair:
    """Two directories, a view that asks one or the other, and what the view reported."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.directories = [OneOfTwo(self.store, "d0", 1), OneOfTwo(self.store, "d1", 1)]
        self.view = DirectoryView()
        self.reported: dict[str, Node] = {}
        self.starts = 1

    async def do(self, step: Step) -> None:
        kind, at, a, b = step
        one, other = self.directories[at], self.directories[1 - at]
        who = Identity("nmo"[a % 3], 1 + b)
        match kind:
            case "register":
                await self.register(one, who, a)
            case "both":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.register, one, who, a)
                    nursery.start_soon(self.register, other, Identity(who.name, 1 + a % 4), b)
            case "drain":
                await one.shared.decide(lambda table: table.drain(who))
            case "leave":
                await one.shared.decide(lambda table: table.leave(who))
            case "lose":
                await one.shared.decide(lambda table: table.lose(who, "gone"))
            case "time":
                for directory in self.directories[: 1 + b % 2]:  # the second may stand still meanwhile
                    await directory.shared._until_done(directory.shared._beat)
                await trio.sleep(LEASE_S / 4 * (a + 1))
                await one.shared.decide(lambda table: table.expire(int(trio.current_time() * 1e9)))
            case "news":
                self.news(one)
            case "restart":
                self.starts += 1
                self.directories[at] = OneOfTwo(self.store, one.me.name, self.starts)
                await self.directories[at].shared.open()

    async def register(self, one: OneOfTwo, who: Identity, a: int) -> None:
        role, key = "ab"[a % 5 == 4], "kl"[a % 4 == 3]
        await one.shared.decide(lambda table: table.register(who, role, f"at {a}", {}, key))

    def news(self, directory: OneOfTwo) -> None:
        """The view asks a directory, which may be behind what the other one reported."""
        table = directory.shared.table
        if self.view.epoch > table.epoch:
            return
        changes = table.since(self.view.epoch)
        news = None if changes is None else self.view.apply(changes)
        if news is None:
            news = self.view.replace(table.epoch, table.nodes.values(), settled=table.settled)
        for change in news:
            name = change.node.identity.name
            if change.kind in ("left", "lost"):
                assert self.reported.pop(name).identity == change.node.identity
            else:
                assert (name in self.reported) == (change.kind != "joined"), f"{change.kind} of {name}"
                self.reported[name] = change.node
        assert self.reported == self.view.nodes

    async def check(self) -> None:
        """Both have one table, its epochs are dense, and no name went over to another role or key while it lived."""
        for directory in self.directories:
            await directory.catch_up()
        one, other = (directory.shared.table for directory in self.directories)
        assert one.image() == other.image(), "DI-1: two directories at one epoch have two tables"
        for directory in self.directories:
            epochs = [change.epoch for change in directory.history]
            assert epochs == list(range(one.epoch + 1 - len(epochs), one.epoch + 1)), "DI-1"
        living: dict[str, Node] = {}
        for change in max((d.history for d in self.directories), key=len):
            name, before = change.node.identity.name, living.get(change.node.identity.name)
            if change.kind in ("left", "lost"):
                living.pop(name, None)
                continue
            assert before is None or before.identity == change.node.identity, f"two lives of {name}"
            assert before is None or before.role == change.node.role, f"{name} is in two roles"
            living[name] = change.node


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_two_directories_of_one_store_have_one_table(trace: list[Step]) -> None:
    async def main() -> None:
        pair = Pair()
        for directory in pair.directories:
            await directory.shared.open()
        for step in trace:
            await pair.do(step)
            await pair.check()
        pair.news(pair.directories[0])
        assert pair.view.nodes == pair.directories[0].shared.table.nodes

    trio.run(main, clock=MockClock(autojump_threshold=0))


def run(main: Any) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_directory_that_starts_late_or_fell_far_behind_takes_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "IMAGE_EVERY", 4)
    monkeypatch.setattr(log, "KEPT_DECISIONS", 8)

    async def main() -> None:
        store = MemoryStore()
        first, slow = OneOfTwo(store, "d0", 1), OneOfTwo(store, "d1", 1)
        await first.shared.open()
        await slow.shared.open()
        for number in range(41):
            who = Identity(f"n{number}", 1)
            await first.shared.decide(lambda table, who=who: table.register(who, "role", "", {}))
        assert len([key for key in store._values if key.startswith("decision/")]) <= 13
        late = OneOfTwo(store, "d2", 1)
        await late.shared.open()
        await trio.sleep(2)  # what it decides next has a number that was forgotten
        await slow.shared.decide(lambda table: table.register(Identity("n", 1), "role", "", {}))
        for one in (first, late):
            await one.catch_up()
        assert first.shared.table.image() == slow.shared.table.image() == late.shared.table.image()
        assert len(first.shared.table.nodes) == 42

    run(main)


def test_nodes_of_a_silent_directory_are_lost_after_a_lease_and_not_while_all_are_silent() -> None:
    async def main() -> None:
        store = MemoryStore()
        one, other = OneOfTwo(store, "d0", 1), OneOfTwo(store, "d1", 1)
        await one.shared.open()
        await other.shared.open()
        for number in range(2):
            who = Identity(f"n{number}", 1)
            await one.shared.decide(lambda table, who=who: table.register(who, "role", "", {}))

        async def expire(after_s: float) -> int:
            await trio.sleep(after_s)
            await other.shared._until_done(other.shared._beat)
            await other.shared.decide(lambda table: table.expire(int(trio.current_time() * 1e9)))
            return len(other.shared.table.nodes)

        await expire(0)
        await one.shared._until_done(one.shared._beat)
        assert await expire(2 * LEASE_S) == 2  # this one stood still itself, and cannot judge
        assert await expire(LEASE_S / 2) == 2
        await other.shared.decide(lambda table: table.register(Identity("n1", 1), "role", "", {}))  # it came over
        assert await expire(LEASE_S / 2) == 1
        assert other.history[-1].node.identity.name == "n0"
        await other.shared.decide(lambda table: table.register(Identity("n2", 1), "role", "", {}))
        again = OneOfTwo(store, "d1", 2)  # it started again: its nodes have a lease to come back
        await again.shared.open()
        await again.shared._until_done(again.shared._beat)
        assert again.shared.table.expire(int((trio.current_time() + LEASE_S / 2) * 1e9)).is_empty
        assert len(again.shared.table.expire(int((trio.current_time() + LEASE_S) * 1e9)).changes) == 2

    run(main)


def test_values_that_no_directory_of_the_cluster_wrote_put_no_node_in(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = MemoryStore()
        one, other = OneOfTwo(store, "d0", 1), OneOfTwo(MemoryStore(), "d0", 1, secret=b"another" * 5)
        await one.shared.open()
        await other.shared.open()
        other.shared.log = one.shared.log
        await other.shared.decide(lambda table: table.register(Identity("n", 1), "role", "", {}))
        key = f"decision/{one.shared.log}/1"
        await store.put(key, other.shared._store._values[key])
        await one.shared.decide(lambda table: table.register(Identity("m", 1), "role", "", {}))
        assert list(one.shared.table.nodes) == ["m"] and "not sealed" in caplog.text
        for secret in (b"another" * 5, None):
            with pytest.raises(ValueError, match="d2 has another secret than d0"):
                await OneOfTwo(store, "d2", 1, secret=secret).shared.open()

    run(main)
