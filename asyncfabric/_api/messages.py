"""Two-sided messages: small payloads with a sender, for bootstrap and RPC; never for bulk data.

Runs on the event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncfabric._api.peer import Peer
from asyncfabric._bridge import faults
from asyncfabric._bridge.landing import Waiter

if TYPE_CHECKING:
    from asyncfabric._api.peers_known import PeersKnown
    from asyncfabric._bridge.stairwell import Stairwell

MAX_MESSAGE_BYTES = 8192
"""Most payload bytes of one message (kMaxMessageBytes)."""


class Message(NamedTuple):
    """A received message: answer with `fabric.send(message.peer, ...)`."""

    peer: Peer
    payload: bytes


class MessageStream:
    """`async for message in fabric.messages()`; each message goes to one of the tasks that iterate."""

    __slots__ = ("_peers", "_stairwell")

    def __init__(self, stairwell: Stairwell, peers: PeersKnown) -> None:
        """Not for users: use `fabric.messages()`."""
        self._stairwell = stairwell
        self._peers = peers

    def __aiter__(self) -> MessageStream:
        return self

    def take_nowait(self) -> list[Message]:
        """Return the messages that are here now, in no order, perhaps none: many for one wake-up."""
        found: list[Message] = []
        self._stairwell.drain()
        while not self._stairwell.closed and (received := self._stairwell.engine.next_message()) is not None:
            found.append(Message(self._peers.by_id(received[0]), received[1]))
        return found

    async def __anext__(self) -> Message:
        """Return the next message.

        Raises:
            ClosedError: the fabric is closed, also when that happens during the wait.

        Cancellation: no message is lost.
        """
        stairwell = self._stairwell
        stairwell.check_loop()
        await stairwell.checkpoint()  # before a message is taken, so that a cancellation cannot lose it
        while not stairwell.closed:
            received = stairwell.engine.next_message()
            if received is not None:
                return Message(self._peers.by_id(received[0]), received[1])
            waiter = Waiter()
            stairwell.message_waiters.append(waiter)
            stairwell.drain()
            try:
                await stairwell.landing.wait(waiter)
            finally:
                if not waiter.ready:
                    stairwell.message_waiters.remove(waiter)
        raise faults.closed("the fabric")
