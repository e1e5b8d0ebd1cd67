"""ScopedChannel: the channel of a participant among those of one layout of engines, where all layouts share a meeting.

Event loop's thread. Names of participants have the layout in front on the way, and changes of others are not received.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncfabric import Fabric
from asyncfabric.control import PeerFound, PeerLost
from asyncfabric.weights.channel import WeightChannel
from asyncfabric.weights.messages import WeightMessage
from asyncfabric.weights.sessions.join import Join, use_fabric

Received = tuple[str, WeightMessage | PeerFound | PeerLost]


class ScopedChannel:
    """A Channel over that of a whole meeting; made by `open_scoped`."""

    def __init__(self, whole: WeightChannel, scope: str) -> None:
        """Not for users."""
        self._whole = whole
        self._scope = scope

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message; see Channel.

        Cancellation: the message has left whole or not at all.
        """
        await self._whole.send(self._scope + to, message)

    async def receive(self) -> Received:
        """Return the next message or change; see Channel.

        Cancellation: nothing is lost.
        """
        while True:
            sender, event = await self._whole.receive()
            if sender.startswith(self._scope):
                return sender[len(self._scope) :], event

    def take_nowait(self) -> list[Received]:
        """Return what is there already; see Channel."""
        scope = self._scope
        return [(name[len(scope) :], event) for name, event in self._whole.take_nowait() if name.startswith(scope)]

    async def aclose(self) -> None:
        """Leave; see Channel.

        Cancellation: the peers find out as if the process had died.
        """
        await self._whole.aclose()

    def __aiter__(self) -> ScopedChannel:
        return self

    async def __anext__(self) -> Received:
        return await self.receive()


@asynccontextmanager
async def open_scoped(join: Join, fabric: Fabric, layout: int, name: str) -> AsyncIterator[ScopedChannel]:
    """Open the channel of a participant of a layout, which leaves with the block; its process has one fabric for all.

    Cancellation: the others lose it.
    """
    scope = f"layout-{layout}/"
    use_fabric(join, fabric)
    async with join.open_channel(scope + name) as whole:
        yield ScopedChannel(whole, scope)
