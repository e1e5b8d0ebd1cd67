"""Supervisors: who is restarted, in which order, when they give up, and what rises then."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from asyncfabric.actors import Actor, ActorDied, Message, Node, Policy, Reference, handles, open_node
from asyncfabric.errors import InternalError


class Break(Message[None]):
    """Ends the actor."""


class Child(Actor):
    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    async def on_start(self) -> None:
        self.log.append(f"+{self.name}")

    async def on_stop(self) -> None:
        self.log.append(f"-{self.name}")

    @handles(Break)
    async def break_(self, message: Break) -> None:
        raise InternalError(f"{self.name} broke")


class Fragile(Child):
    """Fails when it starts again."""

    born = False

    async def on_start(self) -> None:
        await super().on_start()
        if type(self).born:
            raise OSError("no second time")
        type(self).born = True


async def break_(reference: Reference) -> ActorDied:
    with pytest.raises(ActorDied) as caught:
        await reference.named().ask(Break())
    await trio.testing.wait_all_tasks_blocked()
    return caught.value


async def three(node: Node, policy: Policy, log: list[str]) -> list[Reference]:
    supervisor = await node.supervise("s", policy)
    return [await supervisor.spawn(Child, log, name, name=name) for name in "abc"]


@pytest.mark.trio
async def test_one_for_one_restarts_the_one_that_failed() -> None:
    log: list[str] = []
    async with open_node("n") as node:
        _, b, _ = await three(node, Policy("one_for_one", restarts=1), log)
        assert b.name == "s/b"
        log.clear()
        await break_(b)
        assert log == ["-b", "+b"]
        log.clear()
    assert log == ["-c", "-b", "-a"]  # the last first


@pytest.mark.trio
async def test_rest_for_one_restarts_those_that_came_later_too() -> None:
    log: list[str] = []
    async with open_node("n") as node:
        a, b, c = await three(node, Policy("rest_for_one", restarts=1), log)
        log.clear()
        error = await break_(b)
        assert log == ["-b", "-c", "+b", "+c"]
        assert error.origin == "s/b#2 on n"
        with pytest.raises(ActorDied, match="depends on s/b, which failed: InternalError: b broke") as caught:
            await c.ask(Break())
        assert caught.value.origin == "s/b#2 on n"
        assert node.reference("s/a") == a


@pytest.mark.trio
async def test_giving_up_stops_all_and_escalates() -> None:
    log: list[str] = []
    with pytest.raises(ActorDied, match=r"n gave up: s failed: .*supervisor s on n gave up after 2 restarts") as caught:
        async with open_node("n") as node:
            a, b, c = await three(node, Policy(restarts=2, within_s=5.0), log)
            log.clear()
            for one in (a, b, c):
                await break_(one)
            await trio.sleep_forever()
    assert caught.value.origin == "s/c#3 on n"
    assert isinstance(caught.value.__cause__, InternalError)
    assert log == ["-a", "+a", "-b", "+b", "-c", "-b", "-a"]


@pytest.mark.trio
async def test_only_failures_of_the_last_seconds_count(autojump_clock: trio.testing.MockClock) -> None:
    log: list[str] = []
    async with open_node("n") as node:
        a, _, _ = await three(node, Policy(restarts=1, within_s=5.0), log)
        for _ in range(4):
            await break_(a)
            await trio.sleep(5.0)
        assert log.count("+a") == 5


@pytest.mark.trio
async def test_a_supervisor_is_restarted_with_all_its_children() -> None:
    log: list[str] = []
    async with open_node("n", policy=Policy(restarts=1)) as node:
        a, _, _ = await three(node, Policy(restarts=0), log)
        log.clear()
        await break_(a)
        assert log == ["-a", "-c", "-b", "+a", "+b", "+c"]
        log.clear()
        supervisor = node.supervisor
        assert supervisor.children == ("s",)
        with pytest.raises(TypeError, match=r"takes the name .* got Reference"):
            await node.stop(a)  # type: ignore[arg-type]
        await node.stop("s")
        assert log == ["-c", "-b", "-a"]
        assert node.actors == ()
        await three(node, Policy(restarts=0), log)  # the names are free again


@pytest.mark.trio
async def test_a_failed_restart_counts_as_a_failure() -> None:
    log: list[str] = []
    Fragile.born = False
    with pytest.raises(ActorDied, match="f failed: OSError: no second time") as caught:
        async with open_node("n", policy=Policy("rest_for_one", restarts=3)) as node:
            fragile = await node.spawn(Fragile, log, "f", name="f")
            await node.spawn(Child, log, "g", name="g")
            await break_(fragile)
            await trio.sleep_forever()
    assert caught.value.origin == "f#5 on n"
    assert log == ["+f", "+g", "-f", "-g", *["+f", "-f"] * 3]


@pytest.mark.trio
async def test_a_life_that_cannot_be_made_is_its_own_first_cause() -> None:
    made = 0

    def make(log: list[str]) -> Child:
        nonlocal made
        made += 1
        if made > 1:
            raise OSError("no memory")
        return Child(log, "m")

    with pytest.raises(ActorDied, match="m failed: OSError: no memory") as caught:
        async with open_node("n", policy=Policy(restarts=1)) as node:
            await break_(await node.spawn(make, [], name="m"))
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.origin == "m on n"


@pytest.mark.trio
async def test_a_cancelled_spawn_leaves_nothing() -> None:
    log: list[str] = []

    class Slow(Child):
        async def on_start(self) -> None:
            await super().on_start()
            await trio.sleep_forever()

    async with open_node("n") as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: node.spawn(Slow, log, "s", name="s"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert log == ["+s", "-s"]
        assert node.supervisor.children == ()
        await node.spawn(Child, log, "s", name="s")


@pytest.mark.trio
async def test_opening_a_node_in_a_cancelled_scope_ends() -> None:
    with trio.move_on_after(0) as scope:
        async with open_node("n"):
            await trio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.parametrize("bad", [{"strategy": "all"}, {"restarts": -1}, {"within_s": 0.0}])
def test_bad_policies_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        Policy(**bad)  # type: ignore[arg-type]


@pytest.mark.trio
async def test_errors_of_the_body_and_of_the_node_come_together() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_node("n") as node:
            child = await node.spawn(Child, [], "a", name="a")
            try:
                await break_(child)
            finally:
                raise KeyError("mine")
    assert [type(error) for error in caught.value.exceptions] == [ActorDied, KeyError]
