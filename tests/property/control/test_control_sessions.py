"""Sessions under random interleavings, loss, repetition, reordering, restarts and garbage (CS-1, CS-2, CS-3)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from control_world import BODY_BYTES, CHANNELS, CONFIG, NAMES, World
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncfabric.control.events import Received, Tick
from asyncfabric.control.window import largest_body

pytestmark = pytest.mark.slow
ORDERLY = ("move", "move", "move", "post", "post", "post", "dial", "take", "tick", "leave")
FAULTY = (
    *ORDERLY,
    "move",
    "move",
    "post",
    "post",
    "drop",
    "repeat",
    "reorder",
    "garbage",
    "cut",
    "restart",
    "ghost",
    "late",
)
Step = tuple[str, int, int]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of broken frames: their log lines would hide the failure that one looks for."""
    caplog.set_level(logging.CRITICAL, "asyncfabric.control")


def steps(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    one = st.tuples(st.sampled_from(kinds), st.integers(0, 7), st.integers(0, 7))
    return st.lists(one, min_size=30, max_size=150)


def connected_world() -> World:
    """Return a world in which each has a session with each: faults are rarer than the meeting of two that can talk."""
    world = World()
    for source, target in ((0, 1), (1, 2), (2, 0)):
        world.dial(source, target)
    world.exchange()
    assert all(len(process.table.names.peers) == 2 for process in world.processes)
    return world


def do(world: World, step: Step) -> None:
    kind, a, b = step
    waiting = world.waiting()
    queue = waiting[a % len(waiting)] if waiting else None
    me = world.living[NAMES[a % 3]]
    other = world.living[NAMES[(a + 1 + b % 2) % 3]]
    there = world.processes[other].identity
    match kind:
        case "dial":
            world.dial(me, other)
        case "post":
            world.post(me, there, CHANNELS[b // 4], BODY_BYTES if b % 2 else 8)
        case "take":
            world.take_all()
        case "tick":
            world.now_ns += (a + 1) * 100_000_000
            for process in world.processes:
                world.feed(process.number, Tick())
        case "leave":
            world.leave(me, there)
        case "restart":
            world.start(NAMES[a % 3])
        case "ghost":  # a process that was replaced dials, and posts where it still has a session
            ghost = world.processes[a % len(world.processes)]
            if ghost.number != other:
                world.dial(ghost.number, other)
            world.post(ghost.number, there, "x", 8)
        case _ if queue is not None:
            disturb(world, kind, queue, b)


def disturb(world: World, kind: str, queue: Any, b: int) -> None:
    index = b % len(queue.frames)
    match kind:
        case "move":
            world.move(queue)
        case "reorder":
            world.move(queue, index)
        case "drop":
            del queue.frames[index]
        case "repeat":
            queue.frames.insert(index, queue.frames[index])
        case "late":  # a frame comes again, over every other connection of its target
            for other in list(world.queues.values()):
                if other.target == queue.target:
                    other.frames.append(queue.frames[index])
        case "cut":
            queue.frames[index] = queue.frames[index][: b * 3]
        case "garbage":
            world.feed(queue.target, Received(queue.path, bytes([b]) * b))


def agree(world: World) -> None:
    """Whoever has a session has it from both sides, after the deadlines of a faultless world."""
    for process in world.processes:
        for identity in process.table.names.peers:
            other = next(other for other in world.processes if other.identity == identity)
            assert process.identity in other.table.names.peers, f"{process.identity} alone has {identity}"


@given(steps(FAULTY))
@settings(max_examples=80)
@example([("dial", 0, 0), ("dial", 1, 1), *[("move", 0, 0), ("move", 1, 0)] * 4, ("post", 0, 0), ("post", 1, 1)])
def test_parcels_come_in_order_and_once_whatever_happens_to_frames(trace: list[Step]) -> None:
    world = connected_world() if len(trace) % 3 else World()
    for step in trace:
        do(world, step)
    world.settle()
    agree(world)


@given(steps(ORDERLY))
@settings(max_examples=60)
def test_nothing_is_lost_where_no_frame_is(trace: list[Step]) -> None:
    world = World()
    posted: dict[tuple[str, str], list[int]] = {}
    for step in trace:
        before = [process.posted for process in world.processes]
        if step[0] == "tick":
            world.exchange()  # ticks among undelivered frames may run into deadlines: that is the other test
        if step[0] == "dial":
            world.exchange()
            me, other = world.living[NAMES[step[1] % 3]], world.living[NAMES[(step[1] + 1 + step[2] % 2) % 3]]
            if world.processes[other].identity in world.processes[me].table.names.peers:
                continue  # a link does not dial whom it has; a second dial means that the first was lost
        do(world, step)
        if step[0] == "post":
            me = world.living[NAMES[step[1] % 3]]
            to = NAMES[(step[1] + 1 + step[2] % 2) % 3]
            if world.processes[me].posted > before[me]:
                posted.setdefault((NAMES[step[1] % 3], to), []).append(world.processes[me].posted)
    world.exchange()
    for (source, to), numbers in posted.items():
        receiver, sender = world.processes[world.living[to]], world.processes[world.living[source]]
        assert receiver.delivered[sender.identity] == numbers
    for process in world.processes:
        for identity, peer in process.table.names.peers.items():
            # All was taken, so credit for a largest body is there: whoever waits is let go on.
            full = largest_body(CONFIG.window_bytes)
            assert peer.state == "draining" or all(process.table.admits(identity, one, full) for one in CHANNELS)
        counts = process.table.errors.counts
        assert {reason: count for reason, count in counts.items() if count} == {}


@given(steps(FAULTY))
@settings(max_examples=60)
def test_a_world_that_was_bad_can_connect_again(trace: list[Step]) -> None:
    world = connected_world()
    for step in trace:
        do(world, step)
    world.settle()
    a, b = (world.processes[world.living[name]] for name in "ab")
    for _ in range(3):  # once for each side that may still believe in a session that the other has lost
        if b.identity not in a.table.names.peers:
            world.dial(a.number, b.number)
            world.settle()
    assert b.identity in a.table.names.peers
    before = len(b.delivered[a.identity])
    assert world.post(a.number, b.identity, "x")
    world.exchange()
    assert len(b.delivered[a.identity]) == before + 1
