"""RenewedChannel: a channel that begins anew where the others had lost it, as after its process stood still for long.

Event loop's thread. To its user all sessions end and begin, as if the link had broken; it is closed when it cannot
begin anew, as when the store is gone.
"""

from __future__ import annotations

from collections import deque

from asyncfabric._notice import Notice
from asyncfabric.control import PeerFound, PeerLost
from asyncfabric.errors import ClosedError, PeerError
from asyncfabric.weights.channel import WeightChannel
from asyncfabric.weights.messages import WeightMessage

Received = tuple[str, WeightMessage | PeerFound | PeerLost]


class RenewedChannel:
    """A Channel over one that may be replaced."""

    def __init__(self, channel: WeightChannel) -> None:
        """Begin with a channel."""
        self._channel = channel
        self._next: WeightChannel | None = None
        self._ended = False
        self._present: set[str] = set()
        self._losses: deque[Received] = deque()
        self._changed = Notice()

    def renew(self, channel: WeightChannel) -> None:
        """Go on with another channel once everything of this one, which has ended, was received."""
        self._next = channel
        self._changed.notify()

    def end(self) -> None:
        """Go on with no other one."""
        self._ended = True
        self._changed.notify()

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message; see Channel.

        Cancellation: the message has left whole or not at all.
        """
        try:
            await self._channel.send(to, message)
        except ClosedError as error:
            if self._ended:
                raise
            raise PeerError(f"there is no session with {to}: the channel begins anew") from error

    async def receive(self) -> Received:
        """Return the next message or change; see Channel.

        Cancellation: nothing is lost.
        """
        while not self._losses:
            try:
                return self._noted(await self._channel.receive())
            except ClosedError:
                while self._next is None:
                    if self._ended:
                        raise
                    await self._changed.wait()
                self._begin_anew(self._next)
        return self._losses.popleft()

    def take_nowait(self) -> list[Received]:
        """Return what is there already; see Channel."""
        losses = list(self._losses)
        self._losses.clear()
        return losses + [self._noted(one) for one in self._channel.take_nowait()]

    async def aclose(self) -> None:
        """Leave; see Channel.

        Cancellation: the peers find out as if the process had died.
        """
        self.end()
        await (self._next or self._channel).aclose()

    def __aiter__(self) -> RenewedChannel:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.receive()
        except ClosedError:
            raise StopAsyncIteration from None

    def _noted(self, received: Received) -> Received:
        peer, event = received
        if isinstance(event, PeerFound):
            self._present.add(peer)
        elif isinstance(event, PeerLost):
            self._present.discard(peer)
        return received

    def _begin_anew(self, channel: WeightChannel) -> None:
        self._channel, self._next = channel, None
        self._losses.extend((peer, PeerLost("the others had lost this participant")) for peer in sorted(self._present))
        self._present.clear()
