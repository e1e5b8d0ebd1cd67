"""The commit of weight versions under any order of events and deaths: nobody serves what was not decided whole.

A world of one coordinator over a real decision log, receivers with memory that is modelled as the set of bytes that
arrived, and links that keep order within a session. Hypothesis chooses what happens next.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.weights.coordinator.decision import Coordinator, Decide, Phase, Send
from asyncfabric.weights.coordinator.decision_log import DecisionLog
from asyncfabric.weights.messages import Write
from asyncfabric.weights.receiver.machine import Discard, Fetch, Open, Receiver, Report, State

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where putting a line on the disk costs nothing
NAMES = ("a", "b", "c")
SENDER = "trainer"


@dataclass
class Node:
    """A receiver, its two queues, and which versions have all their bytes in its memory."""

    machine: Receiver
    inbox: deque[Any] = field(default_factory=deque)  # from the coordinator
    outbox: deque[Any] = field(default_factory=deque)
    opened: int = 0  # the version whose keys are valid
    opening: int = 0  # the version that the memory is being opened for
    arrival: int = 0  # that it is opened for
    complete: set[int] = field(default_factory=set)
    fetching: Fetch | None = None
    dropped: list[int] = field(default_factory=list)  # arrivals that were discarded and have not ended
    connected: bool = False
    let_in: bool = False  # of one whose owner uses its memory: the owner waits, and uses it no more


class World:
    """Everything, and the invariants."""

    def __init__(
        self, folder: Path, in_place: frozenset[str], owned: frozenset[str] = frozenset(), keep: bool = True
    ) -> None:
        self.path = folder / "log"
        self.in_place = in_place | owned
        self.owned, self.keep = owned, keep
        self.log = DecisionLog(self.path)
        self.coordinator: Coordinator | None = Coordinator(keep=keep)
        self.nodes = {name: self.new(name) for name in NAMES}
        self.written: set[tuple[int, str]] = set()  # (version, receiver) that the sender may write to
        self.decided: set[int] = set()
        self.served: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.deciding: Decide | None = None
        self.beginning: int = 0  # the version whose beginning is on its way to the disk

    def new(self, name: str) -> Node:
        return Node(Receiver(in_place=name in self.in_place, paused=name not in self.owned))

    # ---- the coordinator's side

    def run(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Decide):
                self.deciding = effect
            elif isinstance(effect, Send) and effect.to == SENDER:
                if isinstance(effect.message, Write):
                    assert effect.message.version <= self.log.begun, "WC-6: the number may be given to other bytes"
                    self.written |= {(effect.message.version, name) for name in effect.message.receivers}
            else:
                node = self.nodes[effect.to]
                assert node.connected, "stated to somebody who is not there"
                node.inbox.append(effect.message)

    def begin(self, logged: bool = True) -> None:
        coordinator = self.coordinator
        if coordinator is None or coordinator.phase is not Phase.IDLE or not coordinator.receivers or self.beginning:
            return
        version = max(self.log.begun, coordinator.begun) + 1
        if coordinator.endangered:  # nobody learns of it, so nobody stops for it
            with pytest.raises(ValueError, match="needs a shadow"):
                coordinator.begin(version, "m", [SENDER])
            return
        if logged or coordinator.stoppable:
            self.log.begin(version, "m")
            self.run(coordinator.begin(version, "m", [SENDER]))
        else:
            self.beginning = version
            self.run(coordinator.begin(version, "m", [SENDER], logged=False))

    def begun(self) -> None:
        if self.beginning and self.coordinator is not None:
            version, self.beginning = self.beginning, 0
            self.log.begin(version, "m")
            self.run(self.coordinator.logged(version))

    def record(self, well: bool) -> None:
        if self.deciding is None or self.coordinator is None:
            return
        version, self.deciding = self.deciding.version, None
        if well:
            self.log.commit(version)
            self.decided.add(version)
            self.run(self.coordinator.recorded(version))
        else:
            self.run(self.coordinator.not_recorded(version, "no room"))

    def crash_coordinator(self, decision_was_written: bool) -> None:
        if self.coordinator is None:
            return
        if self.deciding is not None and decision_was_written:
            self.log.commit(self.deciding.version)
            self.decided.add(self.deciding.version)
        self.deciding = self.coordinator = None
        self.beginning = 0
        self.log.close()
        for name in NAMES:
            self.cut(name)

    def restart_coordinator(self) -> None:
        if self.coordinator is None:
            self.log = DecisionLog(self.path)
            assert self.log.committed == max(self.decided, default=0)
            self.coordinator = Coordinator(begun=self.log.begun, committed=self.log.committed, keep=self.keep)

    def leave_out(self, name: str) -> None:
        """Go on without an engine that has not opened its memory; it may be about to."""
        if self.coordinator is not None:
            self.run(self.coordinator.leave_out([name], "it reached no step boundary"))

    def sender_fails(self) -> None:
        if self.coordinator is not None:
            self.run(self.coordinator.sender_failed(SENDER, "by choice"))

    # ---- the receivers' side

    def act(self, name: str, effects: list[Any]) -> None:
        node = self.nodes[name]
        for effect in effects:
            if isinstance(effect, Open | Fetch):
                assert name not in self.in_place or node.machine.serving == 0, "overwritten while it serves"
                assert name not in self.owned or node.let_in, "overwritten while its owner uses it"
            match effect:
                case Report():
                    if node.connected:
                        node.outbox.append(effect.message)
                case Open():
                    node.opened, node.opening, node.arrival = 0, effect.version, effect.arrival
                case Fetch():
                    node.opened = effect.version
                    node.fetching = effect
                case Discard():
                    node.opened = node.opening = 0
                    node.fetching = None
                    node.dropped.append(effect.arrival)
                    node.complete.discard(effect.version)

    def deliver(self, name: str, to_coordinator: bool) -> None:
        node = self.nodes[name]
        if to_coordinator and node.outbox and self.coordinator is not None:
            self.run(self.coordinator.received(name, node.outbox.popleft()))
        elif not to_coordinator and node.inbox:
            self.act(name, node.machine.received(node.inbox.popleft()))

    def open_ends(self, name: str) -> None:
        node = self.nodes[name]
        if node.opening:
            node.opened, node.opening = node.opening, 0
            if name in self.in_place:
                node.complete.clear()  # whatever was there may be overwritten from now on
            self.act(name, node.machine.opened(node.arrival))

    def bytes_arrive(self, name: str, right: bool) -> None:
        node, version = self.nodes[name], self.nodes[name].opened
        if node.machine.state is not State.RECEIVING or (version, name) not in self.written:
            return
        if right:
            node.complete.add(version)
            self.act(name, node.machine.verified(node.arrival))
        else:
            self.act(name, node.machine.failed(node.arrival, "a checksum is wrong"))

    def fetch_ends(self, name: str) -> None:
        node = self.nodes[name]
        if node.fetching is None:
            return
        fetch, node.fetching = node.fetching, None
        version, source = fetch.version, fetch.source
        if version in self.nodes[source].complete and self.nodes[source].machine.held == version:
            if name in self.in_place:
                node.complete.clear()
            node.complete.add(version)
            self.act(name, node.machine.fetched(fetch.arrival))
        else:
            self.act(name, node.machine.fetched(fetch.arrival, "the source does not have it"))

    def dropped_ends(self, name: str, well: bool) -> None:
        """WC-7: an arrival that was discarded ends late, on a thread, and reports whatever it did."""
        node = self.nodes[name]
        for arrival in node.dropped:
            self.act(name, node.machine.opened(arrival))
            if well:
                self.act(name, node.machine.verified(arrival) + node.machine.fetched(arrival))
            else:
                self.act(name, node.machine.failed(arrival, "lost") + node.machine.fetched(arrival, "lost"))
        node.dropped.clear()

    def flip(self, name: str) -> None:
        node = self.nodes[name]
        if name in self.owned and not node.machine.coming:
            return
        node.let_in = name in self.owned
        self.act(name, node.machine.flip())
        self.resume(name)
        serving = node.machine.serving
        assert serving == 0 or serving >= self.served[name], "WC-3: a version went back"
        self.served[name] = max(serving, self.served[name])

    def resume(self, name: str) -> None:
        """The owner of memory goes on with what came, or without, as `Versions.arrived` does."""
        node = self.nodes[name]
        if node.let_in and not node.machine.under_way:
            if node.machine.state is State.COMMITTED:
                self.act(name, node.machine.flip())
            node.machine.resume()
            node.let_in = False

    def connect(self, name: str) -> None:
        if not self.nodes[name].connected and self.coordinator is not None:
            self.nodes[name].connected = True
            self.act(name, self.nodes[name].machine.session_began())

    def cut(self, name: str) -> None:
        node = self.nodes[name]
        if not node.connected:
            return
        node.connected = False
        node.inbox.clear()
        node.outbox.clear()
        self.act(name, node.machine.session_lost())
        if self.coordinator is not None:
            self.run(self.coordinator.receiver_lost(name, "by choice"))

    def kill(self, name: str) -> None:
        self.cut(name)
        self.nodes[name] = self.new(name)
        self.served[name] = 0

    # ---- what must always hold

    def check(self) -> None:
        for node in self.nodes.values():
            serving = node.machine.serving
            assert serving == 0 or serving in self.decided, "WC-1: serves what was not decided"
            assert serving == 0 or serving in node.complete, "WC-1: serves what is not complete"
            if node.machine.state is State.COMMITTED:
                assert node.machine.version in self.decided and node.machine.version in node.complete

    def settle(self) -> None:
        """No more faults: everything is delivered, and the update that is open ends."""
        self.restart_coordinator()
        for name in NAMES:
            self.connect(name)
        self.begun()
        assert self.coordinator is not None
        for _ in range(200):
            for name in NAMES:
                self.deliver(name, True)
                self.deliver(name, False)
                self.open_ends(name)
                self.bytes_arrive(name, True)
                self.fetch_ends(name)
                self.resume(name)
                self.flip(name)
            self.record(True)
            self.check()
        assert self.coordinator.phase is Phase.IDLE and self.coordinator.awaited == ()
        assert not self.coordinator.late, "at step boundaries, and left out for ever"
        held = self.coordinator.receivers
        assert held == {name: node.machine.serving for name, node in self.nodes.items()}
        if self.log.committed in held.values():
            assert set(held.values()) == {self.log.committed}, "who could be brought up was not"
        assert all(node.machine.state is State.IDLE for node in self.nodes.values()), "still in doubt"


name = st.sampled_from(NAMES)
some = st.frozensets(name, max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("begin"), st.booleans()),
    st.tuples(st.just("begun")),
    st.tuples(st.just("deliver"), name, st.booleans()),
    st.tuples(st.just("deliver"), name, st.booleans()),
    st.tuples(st.just("open_ends"), name),
    st.tuples(st.just("bytes_arrive"), name, st.integers(0, 9).map(bool)),
    st.tuples(st.just("record"), st.integers(0, 3).map(bool)),
    st.tuples(st.just("flip"), name),
    st.tuples(st.just("resume"), name),
    st.tuples(st.just("fetch_ends"), name),
    st.tuples(st.just("dropped_ends"), name, st.booleans()),
    st.tuples(st.just("connect"), name),
    st.tuples(st.just("cut"), name),
    st.tuples(st.just("kill"), name),
    st.tuples(st.just("sender_fails")),
    st.tuples(st.just("leave_out"), name),
    st.tuples(st.just("leave_out"), name),
    st.tuples(st.just("crash_coordinator"), st.booleans()),
    st.tuples(st.just("restart_coordinator")),
    st.tuples(st.just("rush"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("rush"), st.integers(1, 4), st.booleans()),
)


@contextmanager
def opened(*about: Any) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        world = World(Path(folder), *about)
        try:
            yield world
        finally:
            world.log.close()


def rush(world: World, rounds: int, logged: bool = True) -> None:
    """A stretch in which all goes well, but that the disk may be slow."""
    world.restart_coordinator()
    for name in NAMES:
        world.connect(name)
        world.deliver(name, True)
    world.begin(logged)
    for _ in range(rounds):
        for name in NAMES:
            world.deliver(name, True)
            world.deliver(name, False)
            world.open_ends(name)
            world.bytes_arrive(name, True)


@settings(deadline=None, max_examples=250)
@given(st.lists(STEPS, min_size=8, max_size=60), some, some, st.booleans())
def test_every_survivor_serves_one_complete_decided_version(
    steps: list[tuple[Any, ...]], in_place: frozenset[str], owned: frozenset[str], keep: bool
) -> None:
    with opened(in_place, owned, keep) as world:
        for what, *arguments in steps:
            (partial(rush, world) if what == "rush" else getattr(world, what))(*arguments)
            world.check()
        world.settle()


def test_twenty_versions_without_faults() -> None:
    with opened(frozenset({"c"})) as world:
        world.settle()
        for version in range(1, 21):
            rush(world, 1)
            world.settle()
            assert [node.machine.serving for node in world.nodes.values()] == [version] * 3


@pytest.mark.parametrize("flips", [0, 1])
def test_an_abort_before_the_memory_is_open_in_place_leaves_nobody_empty(flips: int) -> None:
    """Before the step boundary the old version still serves; after it the coordinator knows that it is gone."""
    with opened(frozenset({"c"})) as world:
        world.settle()
        rush(world, 1)
        world.settle()
        world.begin()
        world.deliver("c", False)
        for _ in range(flips):
            world.flip("c")
        world.sender_fails()
        assert (world.nodes["c"].machine.serving == 0) == bool(flips)
        world.settle()
        assert [node.machine.serving for node in world.nodes.values()] == [1] * 3


def test_an_update_that_nobody_could_keep_the_old_version_of_stops_nobody() -> None:
    """With rollouts in place only, each second update was aborted after all had stopped for it."""
    with opened(frozenset(NAMES)) as world:
        world.settle()
        rush(world, 1)
        world.settle()
        rush(world, 4)
        world.settle()
        assert [node.machine.serving for node in world.nodes.values()] == [1] * 3
        world.in_place = frozenset(NAMES[1:])
        world.kill(NAMES[0])  # starts again with a shadow, and fetches the version that serves
        world.settle()
        rush(world, 1)
        world.settle()
        assert [node.machine.serving for node in world.nodes.values()] == [2] * 3
