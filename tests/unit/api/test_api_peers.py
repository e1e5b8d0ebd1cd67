"""Connecting, warming, groups, messages, and `config.require`."""

from __future__ import annotations

import anyio
import pytest
from fabrics import Outcome, open_fake, open_pair, settled

import asyncfabric as af
from asyncfabric._bridge.status import StatusCode
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio


async def test_connecting_gives_one_peer_for_one_fabric() -> None:
    async with open_pair() as p:
        first = await p.writer.connect(p.reader.address)
        second = await p.writer.connect(bytes(p.reader.address))
        assert first is second and first.address == p.reader.address
        assert first.incarnation == p.reader.address.incarnation
        statistics = first.statistics()
        assert (statistics.id, statistics.state) == (first.id, "connected")
        assert not first.lost
        with pytest.raises(TypeError, match=r"FabricAddress.parse"):
            await p.writer.connect(str(p.reader.address))  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            await p.writer.connect(b"nonsense")


async def test_a_fabric_may_connect_to_itself() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        peer = await fabric.connect(fabric.address)
        region = await fabric.allocate(64)
        region.memory[:4] = b"self"
        with fabric.counter() as counter:
            await fabric.write(region[:4], region.key(), 32, imm=counter.imm)
            await fabric.signal(peer, counter.imm)
            assert await counter.wait(2) == 2
        assert bytes(region.memory[32:36]) == b"self"


async def test_first_use_of_a_key_connects() -> None:
    network = FakeNetwork()
    async with open_fake(network) as reader, open_fake(network) as writer:
        target, source = await reader.allocate(64), await writer.allocate(64)
        key = af.RegionKey.from_bytes(target.key().to_bytes())
        await writer.write(source, key, 0)
        assert [peer.state for peer in writer.statistics().peers] == ["connected"]


async def test_warming_reports_for_each_peer_and_never_raises() -> None:
    network = FakeNetwork()
    async with open_fake(network) as fabric, open_fake(network) as alive:
        async with open_fake(network) as gone:
            dead = gone.address
        reports = await fabric.warm([alive.address, dead, bytes(fabric.address)])
        assert [report.address for report in reports] == [alive.address, dead, fabric.address]
        assert [report.error is None for report in reports] == [True, False, True]
        assert reports[0].peer is await fabric.connect(alive.address) and reports[0].provider
        assert isinstance(reports[1].error, af.PeerError) and reports[1].peer is None
        assert all(report.duration >= 0 for report in reports)
        assert await fabric.warm([]) == []
        with pytest.raises(ValueError):
            await fabric.warm([alive.address, b"nonsense"])


async def test_an_unreachable_peer_is_named_with_a_remedy() -> None:
    network = FakeNetwork()
    async with open_fake(network) as fabric:
        network.fail_next_control(StatusCode.PEER_UNREACHABLE, raw=111)
        with pytest.raises(af.PeerError, match=r"Connection refused.*address is fresh") as caught:
            await fabric.connect(fabric.address)
        assert repr(fabric.address) in str(caught.value) and caught.value.raw == 111


async def test_barriers_signal_each_member() -> None:
    network = FakeNetwork()
    async with open_fake(network) as hub, open_fake(network) as left, open_fake(network) as right:
        group = af.PeerGroup([await hub.connect(fabric.address) for fabric in (left, right, left)])
        assert len(group) == 3
        await hub.barrier(group, 9)
        assert (left.counter(9).value, right.counter(9).value) == (2, 1)


async def test_peers_of_another_fabric_are_refused() -> None:
    async with open_pair() as p:
        foreign = await p.reader.connect(p.writer.address)
        with pytest.raises(ValueError, match="another fabric"):
            p.writer.signal(foreign, 1)


async def test_disconnected_peers_connect_again() -> None:
    async with open_pair() as p:
        peer = await p.writer.connect(p.reader.address)
        await p.writer.disconnect(peer)
        again = await p.writer.connect(p.reader.address)
        await p.writer.signal(again, 3)
        assert await p.reader.counter(3).wait(1) == 1


async def test_required_providers_are_enforced() -> None:
    network = FakeNetwork()
    wrong = af.FabricConfig(rails=("local", "efa"), require=("efa",))
    right = af.FabricConfig(require=("fake+local",))
    async with open_fake(network) as reader, open_fake(network, wrong) as strict, open_fake(network, right) as fine:
        with pytest.raises(af.PeerError, match=r"'fake\+local'.*\['efa'\]"):
            await strict.connect(reader.address)
        report = (await strict.warm([reader.address]))[0]
        assert isinstance(report.error, af.PeerError) and report.peer is None
        target, source = await reader.allocate(64), await fine.allocate(64)
        await fine.write(source, target.key(), 0)
        async with open_fake(network, wrong) as implicit:
            mine = await implicit.allocate(64)
            with pytest.raises(af.PeerError, match="connect"):
                implicit.write(mine, target.key(), 0)


async def test_messages_have_a_sender_who_can_be_answered() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        peer = await p.writer.connect(p.reader.address)
        received: list[af.Message] = []

        async def serve() -> None:
            async for message in p.reader.messages():
                received.append(message)
                await p.reader.send(message.peer, message.payload[::-1])

        outcome = Outcome()
        tasks.start_soon(outcome.run, serve)
        await settled()
        assert (await p.writer.send(peer, b"hello")).bytes == 5
        answer = await p.writer.messages().__anext__()
        assert answer.payload == b"olleh" and answer.peer is peer
        assert received[0].peer.incarnation == p.writer.address.incarnation
        await p.writer.send(peer, memoryview(b""))
        assert (await p.writer.messages().__anext__()).payload == b""
        outcome.scope.cancel()


async def test_messages_are_shared_by_tasks_and_none_is_lost_to_a_cancellation() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks:
        peer = await p.writer.connect(p.reader.address)
        readers = [Outcome() for _ in range(3)]
        for reader in readers:
            tasks.start_soon(reader.run, p.reader.messages().__anext__)
        await settled()
        readers[0].scope.cancel()
        await p.writer.send(peer, b"one")
        await p.writer.send(peer, b"two")
        await settled()
        assert readers[0].cancelled
        assert {reader.value.payload for reader in readers[1:]} == {b"one", b"two"}
        await p.writer.send(peer, b"three")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await p.reader.messages().__anext__()
        assert (await p.reader.messages().__anext__()).payload == b"three"


async def test_waiting_for_messages_ends_with_the_fabric() -> None:
    async with open_fake(FakeNetwork()) as fabric, anyio.create_task_group() as tasks:
        outcome = Outcome()
        tasks.start_soon(outcome.run, fabric.messages().__anext__)
        await settled()
        await fabric.aclose()
        await settled()
        assert isinstance(outcome.error, af.ClosedError)
