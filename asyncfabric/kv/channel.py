"""The channel of both ends of a stream: how messages become bytes, how members are called, how messages find their end.

Runs on the event loop's thread. Any asyncfabric.control.Channel of KV_CODEC does whose members are called as
`member_name` has it. Of its guarantees the ends need one: a message is from whom it is stated to be from. What is lost
with a session is one of the messages that the protocol survives; losses of peers are reported by the fabric.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from asyncfabric import Fabric, FabricAddress
from asyncfabric._groups import beside
from asyncfabric.control import Channel, Codec, FabricChannels, PeerFound, PeerLost
from asyncfabric.errors import ClosedError
from asyncfabric.kv.messages import KvMessage, decode_message, encode_message

logger: logging.Logger = logging.getLogger("asyncfabric.kv")

KV_CODEC: Codec[KvMessage] = Codec(encode_message, decode_message)

KvChannel = Channel[KvMessage]


class MessageHandler(Protocol):
    """An end of the protocol that takes messages: a KvInbox or a KvOutbox."""

    def handle(self, sender: int, message: KvMessage) -> bool:
        """Take a message of a fabric of this incarnation; returns False for one that is not for this handler."""


def member_name(address: FabricAddress) -> str:
    """Return what the member of a kv channel is called whose fabric has this address: the address as text."""
    return str(address)


async def deliver(channel: KvChannel, handlers: Iterable[MessageHandler]) -> None:
    """Hand each message to the handler that it is for, for ever; what nobody takes is logged and dropped.

    Raises:
        ClosedError: the channel was closed.

    Cancellation: no message is lost.
    """
    ends = tuple(handlers)
    while True:
        name, message = await channel.receive()
        if isinstance(message, PeerFound | PeerLost):
            continue
        try:
            sender = FabricAddress.parse(name).incarnation
        except ValueError as error:
            logger.warning("%r, a member of a kv channel, is not called by its address: %s", name, error)
            continue
        if not any(end.handle(sender, message) for end in ends):
            logger.warning("nobody takes %s from fabric %016x", type(message).__name__, sender)


@asynccontextmanager
async def open_kv_channel(fabric: Fabric) -> AsyncIterator[KvChannel]:
    """Open a channel over the messages of a fabric, all of which it takes, with whoever has its address.

    Cancellation: peers find out that it is closed as if the process had died.
    """
    channels = FabricChannels(fabric, KV_CODEC, FabricAddress.parse)
    channel = channels.open(member_name(fabric.address))
    async with beside() as tasks:
        tasks.start_soon(_run, channels)
        try:
            yield channel
        finally:
            await channel.aclose()


async def _run(channels: FabricChannels[KvMessage]) -> None:
    try:
        await channels.run()
    except ClosedError:
        logger.debug("the fabric of a kv channel was closed before it")
