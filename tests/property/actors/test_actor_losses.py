"""Two nodes whose link is cut at random: every call ends, no answer is wrong, nothing is left on either side."""

from __future__ import annotations

import trio
from actor_schedule import TaskCensus, run_example
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.actors import Actor, ActorDied, Identity, Message, Node, Reference, handles, open_node
from asyncfabric.testing.fake_link import FakeLinkNetwork

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "tell", "lookup"]),
        st.sampled_from([0.0, 0.0, 0.2, 1.0]),  # pause before it
        st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 2.0])),  # when it is cancelled
    ),
    max_size=12,
)
CUTS = st.lists(st.sampled_from([0.05, 0.2, 0.5, 1.0, 3.0]), max_size=3)


class Double(Message[int]):
    number: int


class Note(Message[None]):
    number: int


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), calls=CALLS, cuts=CUTS, capacity=st.integers(1, 3), room=st.integers(1, 4))
def test_every_call_ends_and_nothing_is_left(
    seed: int, calls: list[tuple[str, float, float | None]], cuts: list[float], capacity: int, room: int
) -> None:
    outcomes: list[str] = []
    noted: list[int] = []
    reported: list[int] = []
    running = 0

    class Far(Actor):
        @handles(Double)
        async def double(self, message: Double) -> int:
            nonlocal running
            running += 1
            try:
                await trio.sleep(0.3)
            finally:
                running -= 1
            return 2 * message.number

        @handles(Note)
        async def note(self, message: Note) -> None:
            noted.append(message.number)
            await trio.sleep(0.1)

    Far.mailbox_capacity = capacity

    async def call(near: Node, to: Reference, number: int, what: str, patience: float | None) -> None:
        with trio.move_on_after(float("inf") if patience is None else patience) as scope:
            try:
                if what == "ask":
                    assert await to.ask(Double(number)) == 2 * number
                elif what == "tell":
                    await to.tell(Note(number))
                    reported.append(number)
                else:
                    assert await near.lookup(to.node, to.name) == to
            except ActorDied:
                outcomes.append("died")
                return
        outcomes.append("cancelled" if scope.cancelled_caught else "done")

    async def example(census: TaskCensus) -> None:
        before = set(census.tasks)
        network = FakeLinkNetwork(room=room)
        near_link, far_link = network.link("near"), network.link("far")
        await near_link.connect(far_link.address)
        async with open_node("far", far_link) as far, open_node("near", near_link) as near:
            there = await far.spawn(Far, name="far")
            to = Reference(Identity(there.node.name, there.node.incarnation), "far", there.incarnation).bound(near)
            async with trio.open_nursery() as calling:
                calling.start_soon(_cut, network, near_link, far_link, cuts)
                for number, (what, pause, patience) in enumerate(calls):
                    await trio.sleep(pause)
                    calling.start_soon(call, near, to, number, what, patience)
            await trio.sleep(10)
            assert running == 0, "a handler runs for nobody"
            assert near._remote is not None
            assert far._remote is not None
            assert not len(near._remote._outgoing), "a call is still waited for"
            assert not len(far._remote._incoming), "a call is still served"
            assert (near.protocol_errors, far.protocol_errors) == (0, 0)
            if not cuts:
                assert "died" not in outcomes
            assert await (await near.lookup(to.node, "far")).ask(Double(4)) == 8
        assert census.tasks == before

    run_example(seed, example)
    assert len(outcomes) == len(calls), "a call was left alone"
    assert set(reported) <= set(noted), "a reported message was dropped"
    assert len(set(noted)) == len(noted), "a reported message came twice"


async def _cut(network: FakeLinkNetwork, near: object, far: object, cuts: list[float]) -> None:
    for pause in cuts:
        await trio.sleep(pause)
        network.cut(near, far)  # type: ignore[arg-type]
        await trio.sleep(0.05)
        await near.connect(far.address)  # type: ignore[attr-defined]
