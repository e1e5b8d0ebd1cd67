"""SV-1 and SV-2 in random trees with random failures and cancellations: the first cause is reported, no task left."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import trio
import trio.testing
from actor_schedule import TaskCensus, run_example
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.actors import (
    Actor,
    ActorDied,
    ActorError,
    Message,
    Node,
    Policy,
    Reference,
    RemoteError,
    Supervisor,
    handles,
    open_node,
)
from asyncfabric.errors import ClosedError, InternalError


class Boom(InternalError):
    """A failure that nothing else caused; each has a number."""


class Fail(Message[None]):
    """Fail in a handler of `tell`, in one of `ask`, or in a task beside the handlers."""

    where: str


class AskToFail(Message[None]):
    """Die of the death of another."""

    other: str


class Busy(Message[None]):
    """Takes a while, and a while to cancel."""


@dataclass
class World:
    """What really happened, against which errors are compared."""

    booms: dict[int, str] = field(default_factory=dict)  # number of the failure -> life whose code raised it
    first: dict[str, int] = field(default_factory=dict)  # life -> number of its first failure
    running: Counter[str] = field(default_factory=Counter)  # tasks of each life
    lives: dict[str, str] = field(default_factory=dict)  # name -> present life
    faults: list[str] = field(default_factory=list)

    def boom(self, life: str) -> Boom:
        number = len(self.booms)
        self.booms[number] = life
        self.first.setdefault(life, number)
        return Boom(f"boom-{number}!")

    def look_at(self, error: ActorError) -> None:
        """Check SV-1 for one error that somebody got."""
        if not error.origin:
            return  # stopped in good order
        numbers = [int(found) for found in re.findall(r"boom-(\d+)!", error.traceback)]
        if not numbers:
            self.faults.append(f"the traceback of {error} shows no first failure")
        elif self.booms[numbers[-1]] != error.origin:
            self.faults.append(f"{error.origin} is blamed for boom-{numbers[-1]} of {self.booms[numbers[-1]]}")
        elif self.first[error.origin] != numbers[-1]:
            self.faults.append(f"boom-{numbers[-1]} is reported, but the first of {error.origin} was another")


class Subject(Actor):
    mailbox_capacity = 2
    concurrency = 2

    def __init__(self, world: World, tasks: int, children: int, drain: float, echo: bool) -> None:
        self.world = world
        self.tasks = tasks
        self.children = children
        self.drain = drain
        self.echo = echo

    async def on_start(self) -> None:
        words, name = self.reference.label, self.reference.name
        before = self.world.lives.get(name)
        if before is not None and self.world.running[before]:
            self.world.faults.append(f"SV-2: {before} still runs {self.world.running[before]} tasks beside {words}")
        self.world.lives[name] = words
        for _ in range(self.tasks):
            self.start_soon(self._run, float("inf"))
        for number in range(self.children):
            await self.spawn(Subject, self.world, 1, 0, self.drain, self.echo, name=f"c{number}")

    async def on_stop(self) -> None:
        words = self.reference.label
        if self.world.running[words]:
            self.world.faults.append(f"SV-2: on_stop of {words} ran beside its tasks")
        below = [one for name, one in self.world.lives.items() if name.startswith(self.reference.name + "/")]
        if any(self.world.running[one] for one in below):
            self.world.faults.append(f"SV-2: children of {words} outlived it")

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        if message.where == "beside":
            self.start_soon(self._fail)
            await self._run(float("inf"))
        await self._fail()

    @handles(AskToFail)
    async def ask_to_fail(self, message: AskToFail) -> None:
        await self.node.reference(message.other).ask(Fail("asked"))

    @handles(Busy)
    async def busy(self, message: Busy) -> None:
        await self._run(3.0)

    async def _fail(self) -> None:
        raise self.world.boom(self.reference.label)

    async def _run(self, seconds: float) -> None:
        words = self.reference.label
        self.world.running[words] += 1
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.drain)  # as transfers drain
            if self.echo:
                raise self.world.boom(words) from None  # a failure that cancelling brought about
            raise
        finally:
            self.world.running[words] -= 1


POLICIES = st.builds(
    Policy,
    strategy=st.sampled_from(["one_for_one", "rest_for_one"]),
    restarts=st.integers(0, 3),
    within_s=st.sampled_from([0.5, 5.0, 100.0]),
)
LEAVES = st.tuples(st.just("actor"), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 0.1]), st.booleans())
TREES = st.recursive(LEAVES, lambda below: st.tuples(POLICIES, st.lists(below, min_size=1, max_size=3)), max_leaves=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["tell", "ask", "beside", "chain", "busy", "cancelled", "stop"]),
        st.integers(0, 30),
        st.integers(0, 30),
        st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    ),
    max_size=8,
)


async def grow(parent: Supervisor, tree: object, world: World, name: str) -> None:
    assert isinstance(tree, tuple)
    if tree[0] == "actor":
        await parent.spawn(Subject, world, *tree[1:], name=name)
        return
    supervisor = await parent.supervise(name, tree[0])
    for number, below in enumerate(tree[1]):
        await grow(supervisor, below, world, f"n{number}")


async def step(node: Node, world: World, what: str, whom: int, other: int) -> None:
    names = sorted(reference.name for reference in node.actors)
    if not names:
        return
    name, second = names[whom % len(names)], names[other % len(names)]
    try:
        to: Reference = node.reference(name)
        if what == "tell":
            await to.tell(Fail("reported"))
        elif what == "ask":
            await to.ask(Fail("asked"))
        elif what == "beside":
            await to.ask(Fail("beside"))
        elif what == "chain" and name != second:
            await to.tell(AskToFail(second))
        elif what == "busy":
            await to.ask(Busy())
        elif what == "cancelled":
            with trio.move_on_after(0.5):
                await to.ask(Busy())
        elif what == "stop":
            await node.stop(name.split("/")[0])
    except (ActorDied, RemoteError) as error:
        world.look_at(error)


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    root=POLICIES,
    trees=st.lists(TREES, min_size=1, max_size=3),
    steps=STEPS,
    patience=st.one_of(st.none(), st.floats(0.0, 3.0)),
)
def test_sv1_and_sv2_in_random_trees(
    seed: int,
    root: Policy,
    trees: list[object],
    steps: list[tuple[str, int, int, float]],
    patience: float | None,
) -> None:
    world = World()

    async def example(census: TaskCensus) -> None:
        before = set(census.tasks)
        try:
            with trio.move_on_after(float("inf") if patience is None else patience):
                async with open_node("n", policy=root) as node, trio.open_nursery() as asking:
                    for number, tree in enumerate(trees):
                        await grow(node.supervisor, tree, world, f"t{number}")
                    for what, whom, other, pause in steps:
                        asking.start_soon(step, node, world, what, whom, other)
                        await trio.sleep(pause)
                    await trio.sleep(5)
        except* ActorDied as group:
            for error in leaves(group):
                world.look_at(error)
        except* ClosedError:
            pass  # `grow` met a supervisor that had given up
        assert census.tasks == before, "SV-2: tasks outlive their node"

    run_example(seed, example)
    assert world.faults == []
    assert not +world.running, "SV-2: tasks outlive their life"


def leaves(group: BaseExceptionGroup[ActorDied]) -> list[ActorDied]:
    found: list[ActorDied] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


@given(seed=st.integers(0, 2**32 - 1), depth=st.integers(1, 5), reported=st.booleans())
def test_sv1_a_chain_of_deaths_names_its_first(seed: int, depth: int, reported: bool) -> None:
    """Each of a chain asks the next and dies of its death; whoever asks the first learns of the last."""
    world = World()
    caught: list[ActorDied] = []

    class Link(Actor):
        fatal = (ActorError, InternalError)

        @handles(AskToFail)
        async def pass_on(self, message: AskToFail) -> None:
            number = int(self.reference.name[1:])
            if number == depth:
                raise world.boom(self.reference.label)
            await self.node.reference(f"l{number + 1}").ask(AskToFail(""))

    async def example(census: TaskCensus) -> None:
        try:
            async with open_node("n", policy=Policy(restarts=depth if reported else 0)) as node:
                for number in range(depth + 1):
                    await node.spawn(Link, name=f"l{number}")
                try:
                    await node.reference("l0").ask(AskToFail(""))
                except ActorDied as error:
                    caught.append(error)
                    raise
        except ActorDied as error:
            caught.append(error)

    run_example(seed, example)
    assert len(caught) == 2
    assert {error.origin for error in caught} == {f"l{depth}#{depth + 1} on n"}
    assert all(error.kind == "Boom" and "boom-0!" in error.traceback for error in caught)
