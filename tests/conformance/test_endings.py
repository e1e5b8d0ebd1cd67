"""How fabrics and connections end beside messages that nobody takes: bounded, by name, on every provider.

The rails that CI has, and the fake. What every other provider must do as well stands in the public suite.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

import asyncfabric as af
from asyncfabric.testing import FakeEngine, FakeNetwork

CREDITS = 64
SENDS = 100
PATIENCE_S = 20.0
DRAIN_S = 0.3

Open = Callable[..., AbstractAsyncContextManager[af.Fabric]]


@pytest.fixture(params=["fake", "local", "tcp"])
def open_one(request: pytest.FixtureRequest) -> Open:
    """Return what opens a fabric of one rail that drains for DRAIN_S, or for as long as it is given."""
    if request.param == "fake":
        network = FakeNetwork()

        def open_fake(drain_s: float = DRAIN_S) -> AbstractAsyncContextManager[af.Fabric]:
            config = af.FabricConfig(drain_deadline=drain_s)
            return af.open_fabric(config, engine_factory=lambda wanted: FakeEngine(wanted, network))

        return open_fake
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

    def open_native(drain_s: float = DRAIN_S) -> AbstractAsyncContextManager[af.Fabric]:
        return af.open_fabric(af.FabricConfig(rails=(request.param,), drain_deadline=drain_s))

    return open_native


def test_leaving_ends_although_a_living_peer_takes_no_messages(open_one: Open) -> None:
    async def body() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with open_one() as reader:
                async with open_one() as sender:
                    peer = await sender.connect(reader.address)
                    name = repr(peer)
                    sends = [sender.send(peer, b"%d" % number) for number in range(SENDS)]
                for send in sends[:CREDITS]:
                    assert send.result().bytes >= 0, "these had room at the peer"
                for send in sends[CREDITS:]:
                    with pytest.raises(af.TransferError) as caught:
                        send.result()
                    assert name in str(caught.value)
                    assert f"{SENDS - CREDITS} messages" in str(caught.value)
                    assert caught.value.bytes == 0
                taken = [message.payload for message in reader.messages().take_nowait()]
                assert taken == [b"%d" % number for number in range(CREDITS)]

    anyio.run(body, backend="trio")


@pytest.mark.parametrize("provider", ["local", "tcp"])
def test_a_connect_to_a_closed_fabric_fails_at_once(provider: str) -> None:
    """Its listener is gone for good: nobody waits out the deadline, which is there for peers that do not answer."""
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    config = af.FabricConfig(rails=(provider,), connect_deadline=PATIENCE_S * 2)

    async def body() -> None:
        async with af.open_fabric(config) as fabric:
            async with af.open_fabric(config) as gone:
                address = gone.address
            with anyio.fail_after(PATIENCE_S), pytest.raises(af.PeerError, match="could not be reached"):
                await fabric.connect(address)

    anyio.run(body, backend="trio")


def test_two_that_do_not_take_each_others_messages_both_close(open_one: Open) -> None:
    """At once, since who closes takes no more: the deadline would come too late."""

    async def body() -> None:
        ready = [anyio.Event(), anyio.Event()]
        addresses: list[af.FabricAddress] = []
        sends: list[af.Transfer] = []

        async def side(number: int) -> None:
            async with open_one(PATIENCE_S + 5) as fabric:
                addresses.append(fabric.address)
                ready[number].set()
                await ready[1 - number].wait()
                peer = await fabric.connect(next(one for one in addresses if one != fabric.address))
                sends.extend(fabric.send(peer, b"%d" % count) for count in range(SENDS))
                met.append(number)
                if len(met) == 2:
                    both.set()
                await both.wait()

        met: list[int] = []
        both = anyio.Event()
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for number in range(2):
                    tasks.start_soon(side, number)
        refused = 0
        for send in sends:
            try:
                send.result()
            except (af.TransferError, af.PeerError):
                refused += 1
        assert refused >= SENDS - CREDITS, "one of the two had more than may wait for the other"

    anyio.run(body, backend="trio")


def test_the_next_use_after_a_disconnect_connects_again(open_one: Open) -> None:
    async def body() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with open_one() as reader, open_one() as writer:
                target, source = await reader.allocate(64), await writer.allocate(64)
                counter = reader.counter()
                peer = await writer.connect(reader.address)
                used = af.RegionKey.from_bytes(bytes(target.key()))
                await writer.write(source[:1], used, 0, imm=counter.imm)
                count = 1
                fresh = af.RegionKey.from_bytes(bytes(target.key()))
                for use in (
                    lambda: writer.write(source[:1], used, 0, imm=counter.imm),
                    lambda: writer.write(source[:1], fresh, 0, imm=counter.imm),
                    lambda peer=peer: writer.signal(peer, counter.imm),
                    lambda peer=peer: writer.barrier(af.PeerGroup([peer]), counter.imm),
                ):
                    await writer.disconnect(peer)
                    await use()
                    count += 1
                    await counter.wait(count)
                    peer = await writer.connect(reader.address)
                await writer.disconnect(peer)
                await writer.send(peer, b"again")
                assert (await anext(reader.messages())).payload == b"again"

    anyio.run(body, backend="trio")
