"""Whatever a peer sends on the actors' channel: it is counted or refused, and the node serves the others."""

from __future__ import annotations

import msgspec
import trio
from actor_schedule import TaskCensus, run_example
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.actors import Actor, Message, handles, open_node, wire
from asyncfabric.testing.fake_link import FakeLinkNetwork


class Double(Message[int]):
    number: int


class Doubler(Actor):
    mailbox_capacity = 2

    @handles(Double)
    async def double(self, message: Double) -> int:
        return 2 * message.number


NUMBERS = st.one_of(st.integers(0, 5), st.integers(-(2**63), 2**64 - 1))
TEXTS = st.one_of(st.sampled_from(["doubler", "nobody", "Double", "Fail"]), st.text(max_size=8))
BODIES = st.one_of(
    st.just(wire.encoded(Double(4))), st.just(wire.encoded({"number": "four"})), st.just(wire.encoded([1, {}]))
).map(msgspec.Raw)
FRAMES = st.one_of(
    st.builds(
        wire.Call,
        number=NUMBERS,
        actor=TEXTS,
        incarnation=st.integers(0, 3),
        kind=TEXTS,
        body=BODIES,
        asked=st.booleans(),
    ),
    st.builds(wire.Lookup, number=NUMBERS, actor=TEXTS),
    st.builds(wire.CancelCall, number=NUMBERS),
    st.builds(wire.Accepted, number=NUMBERS),
    st.builds(wire.Answer, number=NUMBERS, body=BODIES),
    st.builds(wire.ActorFound, number=NUMBERS, incarnation=NUMBERS),
    st.builds(
        wire.CallFailed,
        number=NUMBERS,
        reason=TEXTS,
        outcome=st.sampled_from(["died", "raised", "unhandled", "refused", "withdrawn"]),
    ),
).map(wire.encoded)
BROKEN = st.tuples(FRAMES, st.integers(0, 200), st.binary(min_size=1, max_size=3)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
)
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.binary(max_size=8)),
    lambda below: st.one_of(st.lists(below, max_size=4), st.dictionaries(TEXTS, below, max_size=4)),
    max_leaves=8,
).map(wire.encoded)
BYTES = st.one_of(st.binary(max_size=64), FRAMES, BROKEN, TREES)


@settings(max_examples=150)
@given(body=st.one_of(BYTES, st.just(b"\x91" * 5000), st.just(b"\x81\xa1a" * 5000)))
def test_decoding_gives_a_frame_or_one_error(body: bytes) -> None:
    try:
        frame = wire.decoded(body)
    except wire.UnknownFrame as error:
        assert error.number is None or isinstance(error.number, int)
    else:
        assert frame.version == wire.VERSION


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), bodies=st.lists(BYTES, min_size=1, max_size=12), reads=st.booleans())
def test_a_node_serves_the_others_whatever_one_sends(seed: int, bodies: list[bytes], reads: bool) -> None:
    async def example(census: TaskCensus) -> None:
        network = FakeLinkNetwork(room=2)
        hostile, home, honest = (network.link(name) for name in ("hostile", "home", "honest"))
        await hostile.connect(home.address)
        await honest.connect(home.address)
        async with (
            open_node("home", home) as node,
            open_node("honest", honest) as other,
            trio.open_nursery() as nursery,
        ):
            await node.spawn(Doubler, name="doubler")
            if reads:
                nursery.start_soon(_read, hostile)
            for body in bodies:
                await hostile.send(home.identity, wire.CHANNEL, body)
            await trio.sleep(1)
            doubler = await other.lookup(node.identity, "doubler")
            assert await doubler.ask(Double(21)) == 42
            assert doubler.incarnation == 1, "a stranger's frame ended an actor"
            nursery.cancel_scope.cancel()

    run_example(seed, example)


async def _read(link: object) -> None:
    async with link.listen(wire.CHANNEL) as answers:  # type: ignore[attr-defined]
        async for answer in answers:
            wire.decoded(answer.body)
