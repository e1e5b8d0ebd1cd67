"""SV-3: a full mailbox pushes back, it never drops; what was put in is handled once, in order, here and from afar."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from actor_schedule import TaskCensus, dice, run_example
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.actors import Actor, ActorDied, Message, Node, Reference, handles, open_node
from asyncfabric.actors.mailbox import EndOfMailbox, Mailbox, MailboxPlace
from asyncfabric.testing.fake_link import FakeLinkNetwork

SEEDS = st.integers(0, 2**32 - 1)
PAUSES = st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])
SENDERS = st.lists(
    st.lists(st.tuples(PAUSES, st.one_of(st.none(), st.floats(0.0, 4.0))), max_size=6), min_size=1, max_size=4
)
"""For each sender its messages: how long it pauses before, and after how long it gives up, None for never."""


class Item(Message[None]):
    sender: int
    number: int


class Ask(Message[int]):
    sender: int
    number: int


def handled_right(
    handled: list[tuple[int, int]], reported: list[tuple[int, int]], given_up: list[tuple[int, int]], *, certain: bool
) -> None:
    """Check that what was put in was handled once and in order, and what was given up not at all."""
    assert len(set(handled)) == len(handled), "handled twice"
    assert set(reported) <= set(handled), "dropped"
    if certain:
        assert not set(given_up) & set(handled), "handled although its reporting was cancelled"
    for sender in {one for one, _ in handled}:
        numbers = [number for one, number in handled if one == sender]
        assert numbers == sorted(numbers), "out of order"


@given(seed=SEEDS, capacity=st.integers(1, 4), senders=SENDERS, pauses=st.lists(PAUSES, min_size=1, max_size=4))
def test_sv3_a_mailbox_drops_nothing(
    seed: int, capacity: int, senders: list[list[tuple[float, float | None]]], pauses: list[float]
) -> None:
    reported: list[tuple[int, int]] = []
    given_up: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []

    async def example(census: TaskCensus) -> None:
        mailbox: Mailbox[tuple[int, int]] = Mailbox(capacity)

        async def send(sender: int) -> None:
            for number, (pause, patience) in enumerate(senders[sender]):
                await trio.sleep(pause)
                with trio.move_on_after(float("inf") if patience is None else patience) as scope:
                    await mailbox.put((sender, number))
                    assert len(mailbox) <= capacity
                (given_up if scope.cancelled_caught else reported).append((sender, number))

        async def take() -> None:
            for pause in _cycle(pauses):
                await trio.sleep(pause)
                with trio.move_on_after(0.25):
                    try:
                        taken.append(await mailbox.take())
                    except EndOfMailbox:
                        return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            async with trio.open_nursery() as sending:
                for sender in range(len(senders)):
                    sending.start_soon(send, sender)
            assert mailbox.seal(lambda: RuntimeError("sealed")) == []

    run_example(seed, example)
    handled_right(taken, reported, given_up, certain=True)


@given(
    capacity=st.integers(1, 3),
    does=st.lists(st.sampled_from(["enter", "enter", "take", "withdraw"]), max_size=30),
    seed=SEEDS,
)
def test_sv3_places_keep_their_order(capacity: int, does: list[str], seed: int) -> None:
    """As the pump of a link uses it: places are taken without an await, and some are withdrawn."""

    async def example(census: TaskCensus) -> None:
        choose = dice(seed)
        mailbox: Mailbox[int] = Mailbox(capacity)
        expected: list[MailboxPlace[int]] = []
        for number, what in enumerate(does):
            if what == "enter":
                expected.append(mailbox.enter(number))
            elif what == "withdraw" and expected:
                assert expected.pop(choose.randrange(len(expected))).withdraw()
            elif what == "take" and expected:
                assert await mailbox.take() == expected.pop(0).item
            assert [place.where for place in expected[:capacity]] == ["box"] * len(expected[:capacity])
            assert {place.where for place in expected[capacity:]} <= {"line"}
            assert mailbox.waiting == len(expected[capacity:])
        for place in expected:
            assert await mailbox.take() == place.item

    run_example(seed, example)


@given(
    seed=SEEDS,
    capacity=st.integers(1, 3),
    concurrency=st.integers(1, 3),
    senders=SENDERS,
    pauses=st.lists(PAUSES, min_size=1, max_size=4),
    afar=st.booleans(),
    asked=st.booleans(),
)
def test_sv3_an_actor_handles_what_it_was_sent(
    seed: int,
    capacity: int,
    concurrency: int,
    senders: list[list[tuple[float, float | None]]],
    pauses: list[float],
    afar: bool,
    asked: bool,
) -> None:
    reported: list[tuple[int, int]] = []
    given_up: list[tuple[int, int]] = []
    handled: list[tuple[int, int]] = []
    finished: list[tuple[int, int]] = []
    running: set[tuple[int, int]] = set()
    turns = _cycle(pauses)
    at_once = 0

    class Sink(Actor):
        @handles(Item)
        async def item(self, message: Item) -> None:
            await self._take(message)

        @handles(Ask)
        async def ask(self, message: Ask) -> int:
            await self._take(message)
            return message.number

        async def _take(self, message: Item | Ask) -> None:
            nonlocal at_once
            at_once += 1
            assert at_once <= concurrency
            item = (message.sender, message.number)
            handled.append(item)
            running.add(item)
            try:
                await trio.sleep(next(turns))
                finished.append(item)
            finally:
                at_once -= 1
                running.remove(item)

    Sink.mailbox_capacity, Sink.concurrency = capacity, concurrency

    async def send(to: Reference, sender: int) -> None:
        for number, (pause, patience) in enumerate(senders[sender]):
            await trio.sleep(pause)
            with trio.move_on_after(float("inf") if patience is None else patience) as scope:
                if asked:
                    assert await to.ask(Ask(sender, number)) == number
                else:
                    await to.tell(Item(sender, number))
            # It may have finished in the moment of the cancel, but it does not go on behind the asker's back.
            assert not asked or (sender, number) not in running
            (given_up if scope.cancelled_caught else reported).append((sender, number))

    async def example(census: TaskCensus) -> None:
        network = FakeLinkNetwork(room=2)
        near_link, far_link = network.link("near"), network.link("far")
        await near_link.connect(far_link.address)
        async with open_node("far", far_link) as far, open_node("near", near_link) as near:
            sink = await (far if afar else near).spawn(Sink, name="sink")
            to = Reference(sink.node, sink.name, sink.incarnation).bound(near)
            async with trio.open_nursery() as sending:
                for sender in range(len(senders)):
                    sending.start_soon(send, to, sender)
            await _emptied(far if afar else near)

    run_example(seed, example)
    if asked:
        assert set(reported) <= set(finished)
        handled_right(handled, reported, given_up, certain=False)
    else:
        handled_right(handled, reported, given_up, certain=not afar)
        assert len(finished) == len(handled)


@given(seed=SEEDS, capacity=st.integers(1, 3), afar=st.booleans(), askers=st.integers(1, 8), when=st.floats(0.0, 6.0))
def test_sv3_a_mailbox_closes_with_its_actor(seed: int, capacity: int, afar: bool, askers: int, when: float) -> None:
    outcomes: list[object] = []

    class Slow(Actor):
        @handles(Ask)
        async def ask(self, message: Ask) -> int:
            await trio.sleep(1)
            return message.number

    Slow.mailbox_capacity = capacity

    async def ask(to: Reference, number: int) -> None:
        try:
            outcomes.append(await to.ask(Ask(0, number)))
        except ActorDied as error:
            outcomes.append(error)

    async def example(census: TaskCensus) -> None:
        network = FakeLinkNetwork(room=2)
        near_link, far_link = network.link("near"), network.link("far")
        await near_link.connect(far_link.address)
        async with open_node("far", far_link) as far, open_node("near", near_link) as near:
            home = far if afar else near
            slow = await home.spawn(Slow, name="slow")
            to = Reference(slow.node, slow.name, slow.incarnation).bound(near)
            async with trio.open_nursery() as asking:
                for number in range(askers):
                    asking.start_soon(ask, to, number)
                await trio.sleep(when)
                begun = trio.current_time()
                await home.stop("slow")
            assert trio.current_time() == begun, "an asker learned of the death late"

    run_example(seed, example)
    assert len(outcomes) == askers, "an asker was left alone"


def _cycle(pauses: list[float]) -> Iterator[float]:
    while True:
        yield from pauses
        yield 0.1


async def _emptied(node: Node) -> None:
    life = node.life("sink")
    while len(life.mailbox) or life._running:  # noqa: ASYNC110  # virtual time
        await trio.sleep(0.5)
