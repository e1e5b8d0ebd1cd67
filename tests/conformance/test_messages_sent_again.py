"""Messages on a connection that breaks are sent again: all come, once and in order, and so do words about credits."""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af
from asyncfabric.testing.conformance.setting import left_to

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

ROUNDS = 40
WRITES = 16
MESSAGES = 12
"""Of each round: in seven rounds more than may be untaken."""
WRITE_BYTES = 1 << 18
PATIENCE_S = 60.0


async def arrives(write: af.Transfer) -> bool:
    """Return whether a write arrived, or met a broken connection."""
    try:
        await write
    except af.TransferError:
        return False
    return True


async def talk(sender: af.Fabric, receiver: af.Fabric) -> int:
    """Send beside writes that are refused; returns how many of them met a broken connection."""
    peer = await sender.connect(receiver.address)
    source = left_to(sender, await sender.allocate(WRITE_BYTES))
    broken = 0
    for number in range(ROUNDS):
        target = await receiver.allocate(WRITE_BYTES)
        key = af.RegionKey.from_bytes(bytes(target.key("write")))
        while not await arrives(sender.write(source, key, 0)):  # then the key is known to be good
            broken += 1
        writes = [sender.write(source, key, 0) for _ in range(WRITES)]
        sends = [sender.send(peer, b"%d" % (number * MESSAGES + index)) for index in range(MESSAGES)]
        await target.release()
        for write in writes:
            try:
                broken += not await arrives(write)
            except af.StaleKeyError:
                continue
        for send in sends:
            await send
    return broken


async def listen(receiver: af.Fabric) -> None:
    expected = iter(range(ROUNDS * MESSAGES))
    async for message in receiver.messages():
        assert int(message.payload) == next(expected)
        if int(message.payload) == ROUNDS * MESSAGES - 1:
            return


def test_messages_beside_refused_writes_come_once_and_in_order() -> None:
    """Over tcp a target hangs up on a write to a dead key, and whatever was on the connection is lost, both ways."""

    async def body() -> None:
        config = af.FabricConfig(rails=("tcp",))
        broken: list[int] = []
        with anyio.fail_after(PATIENCE_S):
            async with af.open_fabric(config) as one, af.open_fabric(config) as other:

                async def side(sender: af.Fabric, receiver: af.Fabric) -> None:
                    broken.append(await talk(sender, receiver))

                async with anyio.create_task_group() as tasks:
                    for sender, receiver in ((one, other), (other, one)):
                        tasks.start_soon(listen, receiver)
                        tasks.start_soon(side, sender, receiver)
        assert sum(broken) > 0, "no connection broke"

    anyio.run(body, backend="trio")


DEAF = af.FabricConfig(rails=("fault+local?harm_messages=3",))
"""A third of what this engine sends never comes."""


def test_words_about_what_was_taken_may_be_lost() -> None:
    """They report how much was taken in all, so the next one heals what was lost."""

    async def body() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with (
                af.open_fabric(af.FabricConfig(rails=("local",))) as sender,
                af.open_fabric(DEAF) as receiver,
                anyio.create_task_group() as tasks,
            ):
                peer = await sender.connect(receiver.address)
                tasks.start_soon(listen, receiver)
                sends = [sender.send(peer, b"%d" % number) for number in range(ROUNDS * MESSAGES)]
                for send in sends:
                    await send

    anyio.run(body, backend="trio")


def test_words_about_counters_that_open_again_may_be_lost() -> None:
    """A number is free again when all peers know it; who has not confirmed that is notified once more."""

    async def body() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with (
                af.open_fabric(DEAF) as owner,
                af.open_fabric(af.FabricConfig(rails=("local",))) as writer,
            ):
                peer = await writer.connect(owner.address)
                for count in range(1, 13):
                    with await owner.open_counter(5) as counter:
                        await writer.signal(peer, 5)
                        assert await counter.wait(1) == 1, f"the {count}th counter of this number"

    anyio.run(body, backend="trio")
