"""Two-sided messages: small payloads with a sender, for bootstrap and RPC; never for bulk data.

Runs on the event loop's thread.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

from asyncfabric._api.peer import Peer
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.loop_adapter import Waiter

if TYPE_CHECKING:
    from asyncfabric._api.peers_known import PeersKnown
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

ALL = 1 << 30
MAX_MESSAGE_BYTES = 8192
"""Most payload bytes of one message (kMaxMessageBytes)."""


class Message(NamedTuple):
    """A received message: answer with `fabric.send(message.peer, ...)`."""

    peer: Peer
    payload: bytes


_message = tuple.__new__  # 100 ns, against 250 ns through the class


class MessageStream:
    """`async for message in fabric.messages()`; each message goes to one of the tasks that iterate."""

    __slots__ = ("_dispatcher", "_peers")

    def __init__(self, dispatcher: CompletionDispatcher, peers: PeersKnown) -> None:
        """Not for users: use `fabric.messages()`."""
        self._dispatcher = dispatcher
        self._peers = peers

    def __aiter__(self) -> MessageStream:
        return self

    def take_nowait(self) -> list[Message]:
        """Return the messages that are here now, in no order, perhaps none: many for one wake-up."""
        dispatcher = self._dispatcher
        dispatcher.drain()
        if dispatcher.closed:
            return []
        return self._named(dispatcher.engine.take_messages(ALL))

    def spin(self, deadline: float) -> list[Message]:
        """Return the messages that are here, at least one.

        Spins with the GIL released until one comes: the lowest latency, at the price of a whole core. The event loop
        and its other tasks wait meanwhile.

        Args:
            deadline: seconds from now.

        Raises:
            RuntimeError: in another thread than the event loop's.
            TransferError: the deadline passed.
            ClosedError: the fabric is closed.
        """
        if not 0 <= deadline <= 1e9:
            raise ValueError(f"deadline must be in 0..1e9 seconds, got {deadline!r}")
        dispatcher = self._dispatcher
        dispatcher.check_thread()
        if dispatcher.closed:
            raise faults.closed("the fabric")
        try:
            return self._named(dispatcher.engine.spin_messages(ALL, monotonic_ns() + round(deadline * 1e9)))
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"spinning for a message, {deadline:g} s")) from None

    async def __anext__(self) -> Message:
        """Return the next message.

        Raises:
            ClosedError: the fabric is closed, also when that happens during the wait.

        Cancellation: no message is lost.
        """
        dispatcher = self._dispatcher
        dispatcher.check_loop()
        await dispatcher.checkpoint()  # before a message is taken, so that a cancellation cannot lose it
        while not dispatcher.closed:
            for peer, payload in dispatcher.engine.take_messages(1):
                return _message(Message, (self._peers.by_id(peer), payload))
            waiter = Waiter()
            dispatcher.message_waiters.append(waiter)
            dispatcher.drain()
            try:
                await dispatcher.adapter.wait(waiter)
            finally:
                if not waiter.ready:
                    dispatcher.message_waiters.remove(waiter)
        raise faults.closed("the fabric")

    def _named(self, received: list[tuple[int, bytes]]) -> list[Message]:
        by_id = self._peers.by_id
        return [_message(Message, (by_id(peer), payload)) for peer, payload in received]
