"""Checks of two-sided messages: small, for bootstrap and calls; whole or not at all."""

from __future__ import annotations

import anyio

import asyncfabric as af
from asyncfabric.testing.conformance.setting import FabricFactory, carried_address, open_many, open_pair

LONGEST = 8192


async def check_messages(factory: FabricFactory) -> None:
    """Payloads of every size arrive whole, each once, with the peer that sent them."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        payloads = [pair.chance.randbytes(size) for size in (0, 1, 2, 100, 1000, 4096, LONGEST - 1, LONGEST)]
        received = []

        async def receive() -> None:
            async for message in pair.target.messages():
                received.append(bytes(message.payload))
                assert message.peer is not None
                if len(received) == len(payloads):
                    return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            for payload in payloads:
                await pair.writer.send(peer, payload)
        assert sorted(received) == sorted(payloads)


async def check_answers(factory: FabricFactory) -> None:
    """The peer of a received message can be answered without knowing its address."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()

        async def serve() -> None:
            async for message in pair.target.messages():
                await pair.target.send(message.peer, bytes(message.payload)[::-1])
                if message.payload == b"last":
                    return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            answers = pair.writer.messages()
            for question in (b"abc", b"", b"last"):
                await pair.writer.send(peer, question)
                answer = await anext(answers)
                assert bytes(answer.payload) == question[::-1]


async def check_message_bounds(factory: FabricFactory) -> None:
    """A payload that is too long or no bytes raises at the call and harms nothing."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        for payload in (bytes(LONGEST + 1), "text", None, 5):
            try:
                await pair.writer.send(peer, payload)  # type: ignore[arg-type]
            except (ValueError, TypeError):
                continue
            raise AssertionError("a bad payload was sent")
        await pair.writer.send(peer, b"good")
        async for message in pair.target.messages():
            assert bytes(message.payload) == b"good"
            break


async def check_message_spin(factory: FabricFactory) -> None:
    """A program that spins takes every message, also of more than may wait, and sees a deadline as an error."""
    async with open_pair(factory) as pair:
        peer, stream = await pair.peer(), pair.target.messages()
        try:
            stream.spin(0.01)
        except af.TransferError:
            pass
        else:
            raise AssertionError("spin returned a message that never came")
        payloads = [b"%d" % number for number in range(150)]
        sent = [pair.writer.send(peer, payload) for payload in payloads]
        received: list[bytes] = []
        while len(received) < len(payloads):
            received += [bytes(message.payload) for message in stream.spin(20.0)]
        assert sorted(received) == sorted(payloads)
        for transfer in sent:
            await transfer


async def check_messages_of_many(factory: FabricFactory) -> None:
    """Messages of several senders are distinguished."""
    count = min(8, factory.peers)
    async with factory.open() as hub, open_many(factory, count) as members:
        senders: dict[bytes, set[object]] = {}

        async def receive() -> None:
            taken = 0
            async for message in hub.messages():
                senders.setdefault(bytes(message.payload), set()).add(message.peer.id)
                taken += 1
                if taken == 5 * count:
                    return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            for number, member in enumerate(members):
                peer = await member.connect(carried_address(hub))
                for _ in range(5):
                    await member.send(peer, bytes([number]))
        assert sorted(senders) == [bytes([number]) for number in range(count)]
        assert all(len(ids) == 1 for ids in senders.values()), "one sender is one peer"
        assert len(set().union(*senders.values())) == count


async def check_release_while_messages_pour_in(factory: FabricFactory) -> None:
    """What is released has to get answers of all who wrote to it; messages before their answers are in no way.

    As many as senders may have under way, from more of them than a rail has receives for; none is lost by it.
    """
    count, each = min(4, factory.peers), 64
    async with factory.open() as hub, open_many(factory, count) as members:
        region = await hub.allocate(4096)
        peers = []
        for member in members:
            peers.append(await member.connect(carried_address(hub)))
            source = await member.allocate(4096)
            await member.write(source, region.key("write"), 0)
            await source.release()
        sent = [
            member.send(peer, number.to_bytes(2, "little") * 2048)
            for member, peer in zip(members, peers, strict=True)
            for number in range(each)
        ]
        await region.release()
        received: list[bytes] = []
        async for message in hub.messages():
            received.append(bytes(message.payload[:2]))
            if len(received) == len(sent):
                break
        for transfer in sent:
            await transfer
        assert sorted(received) == sorted(number.to_bytes(2, "little") for number in range(each) for _ in members)


async def check_unreachable_peers(factory: FabricFactory) -> None:
    """A fabric that is gone is a PeerError within the deadline, by `connect` and in the report of `warm`."""
    async with factory.open() as fabric:
        async with factory.target() as gone:
            address = carried_address(gone)
        try:
            await fabric.connect(address)
        except af.PeerError:
            pass
        else:
            raise AssertionError("connected to a closed fabric")
        async with factory.target() as alive:
            reports = await fabric.warm([address, carried_address(alive)])
            assert len(reports) == 2, "warm reports per peer instead of raising for all"
            counter = alive.counter()
            await fabric.signal(await fabric.connect(carried_address(alive)), counter.imm)
            assert await counter.wait(1) == 1
