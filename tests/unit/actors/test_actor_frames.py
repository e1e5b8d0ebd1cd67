"""Frames of strangers, of other versions and of too many calls: counted, refused, and nobody is harmed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from actor_cast import Add, Wait, Worker
from actor_links import KINDS, Opener, link_opener
from actor_two_nodes import two_nodes

from asyncfabric.actors import (
    Message,
    Reference,
    open_node,
    wire,
)
from asyncfabric.errors import LocalProtocolError
from asyncfabric.testing.fake_link import LARGEST_BODY, FakeLink, FakeLinkNetwork

pytestmark = pytest.mark.trio


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return link_opener(str(request.param), tmp_path)


async def test_what_is_no_frame_is_counted_and_refused(opener: Opener) -> None:
    async with two_nodes(opener) as two, two.near_link.watch():
        newer = {"type": "call", "number": 7, "version": 2}
        stranger = {"type": "teleport", "number": 8, "version": 1}
        for body in (b"", b"\xc1", b"\x93\x01\x02\x03", wire.encoded(newer), wire.encoded(stranger)):
            await two.near_link.send(two.far.identity, wire.CHANNEL, body)
        cycle = wire.encoded({"type": "cancel", "number": 9, "version": 1})
        await two.near_link.send(two.far.identity, wire.CHANNEL, cycle)
        assert await two.worker.ask(Add(1, 1)) == 2
        assert two.far.protocol_errors == 5


async def test_a_frame_of_another_version_is_refused_by_number() -> None:
    network = FakeLinkNetwork()
    here, there = network.link("here"), network.link("there")
    async with open_node("there", there) as node, here.listen(wire.CHANNEL) as answers:
        await here.connect(there.address)
        await here.send(there.identity, wire.CHANNEL, wire.encoded({"type": "call", "number": 7, "version": 2}))
        answer = wire.decoded((await answers.receive()).body)
        assert isinstance(answer, wire.CallFailed)
        assert (answer.number, answer.outcome) == (7, "refused")
        assert "cannot be read" in answer.reason
        assert node.protocol_errors == 1


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "k" * (LARGEST_BODY - 100), "number": 7, "version": 1},
        wire.Lookup(number=7, actor="k" * (LARGEST_BODY - 100)),
        wire.Call(
            number=7,
            actor="worker",
            incarnation=0,
            kind="k" * (LARGEST_BODY - 120),
            body=msgspec.Raw(b"\xc0"),
            asked=True,
        ),
    ],
    ids=["type", "actor", "kind"],
)
async def test_an_answer_that_would_quote_more_than_a_frame_holds_is_short(frame: object) -> None:
    network = FakeLinkNetwork()
    here, there = network.link("here"), network.link("there")
    async with open_node("there", there) as node, here.listen(wire.CHANNEL) as answers:
        await here.connect(there.address)
        await node.spawn(Worker, [], trio.Event(), name="worker")
        await here.send(there.identity, wire.CHANNEL, wire.encoded(frame))
        answer = wire.decoded((await answers.receive()).body)
        assert isinstance(answer, wire.CallFailed) and answer.number == 7 and len(answer.reason) < 1000


async def test_more_calls_than_the_window_are_refused_and_harm_nobody() -> None:
    network = FakeLinkNetwork(room=1000)
    here, there = network.link("here"), network.link("there")
    async with open_node("there", there) as node, here.listen(wire.CHANNEL) as answers:
        await here.connect(there.address)
        gate = trio.Event()
        await node.spawn(Worker, [], gate, name="worker")
        await send_calls(here, there, [Wait(), *[Add(1, 1)] * 90])
        outcomes = [wire.decoded((await answers.receive()).body) for _ in range(3 + 24)]
        refused = [frame for frame in outcomes if isinstance(frame, wire.CallFailed)]
        assert len(refused) == 24  # 1 is handled, 2 are in the mailbox, 64 in line
        assert {frame.outcome for frame in refused} == {"refused"}
        gate.set()
        answered = [wire.decoded((await answers.receive()).body) for _ in range(64 + 67)]
        assert sum(isinstance(frame, wire.Answer) for frame in answered) == 67


async def send_calls(here: FakeLink, there: FakeLink, messages: list[Message[object]]) -> None:
    for number, message in enumerate(messages):
        body = msgspec.Raw(wire.encoded(message))
        kind = type(message).__name__
        call = wire.Call(number=number, actor="worker", incarnation=0, kind=kind, body=body, asked=True)
        await here.send(there.identity, wire.CHANNEL, wire.encoded(call))


async def test_a_refused_call_is_our_protocol_error() -> None:
    network = FakeLinkNetwork()
    here, there = network.link("here"), network.link("there")
    async with open_node("here", here) as node, there.listen(wire.CHANNEL) as calls:
        await here.connect(there.address)

        async def refuse() -> None:
            call = wire.decoded((await calls.receive()).body)
            failed = wire.CallFailed(number=call.number, outcome="refused", reason="too many")
            await there.send(here.identity, wire.CHANNEL, wire.encoded(failed))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
            with pytest.raises(LocalProtocolError, match="too many"):
                await Reference(there.identity, "worker", 0).bound(node).ask(Add(1, 1))
