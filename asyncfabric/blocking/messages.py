"""Messages of a blocking fabric: small payloads with a sender, for bootstrap and RPC; never for bulk data.

Any thread; each message goes to one of those that receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._api.messages import ALL, Message
from asyncfabric._api.messages import MessageStream as AwaitedStream
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.blocking.deadlines import until

if TYPE_CHECKING:
    from asyncfabric._api.peers_known import PeersKnown
    from asyncfabric._bridge.threads import ThreadDispatcher

_DRAIN_EVERY = 63


class MessageStream:
    """`for message in fabric.messages()`, or its calls; each message goes to one of the threads that receive."""

    __slots__ = ("_dispatcher", "_stream", "_takes")

    def __init__(self, dispatcher: ThreadDispatcher, peers: PeersKnown) -> None:
        """Not for users: use `fabric.messages()`."""
        self._dispatcher = dispatcher
        self._stream = AwaitedStream(dispatcher, peers)
        self._takes = 0

    def receive(self, deadline: float | None = None) -> Message:
        """Return the next message; blocks until there is one.

        Args:
            deadline: seconds from now; None waits as long as it takes.

        Raises:
            TimeoutError: none came by then.
            ClosedError: the fabric is closed, also when that happens during the wait.
        """
        limit = until(deadline)
        try:
            return self._dispatcher.run(self._stream.__anext__(), limit)
        except TimeoutError:
            raise TimeoutError(f"no message came within {deadline:g} s") from None

    def take_nowait(self) -> list[Message]:
        """Return the messages that are here now, in no order, perhaps none; a look brings on what is under way."""
        received = self._take()
        if not received:
            return []  # programs that poll mostly see this: no lock was taken for it
        with self._dispatcher.lock:
            return self._stream._named(received)

    def _take(self) -> list[tuple[int, bytes]]:
        """Return what take_nowait() does, with the numbers of the peers instead of their names."""
        dispatcher = self._dispatcher
        if dispatcher.closed:
            return []
        try:
            received = dispatcher.engine.take_messages(ALL, True)
        except EngineStatusError:
            return []  # closed by another thread
        if received:
            self._takes += 1
            if not self._takes & _DRAIN_EVERY:
                dispatcher.drain()  # the completions that announced them, which nobody else may take
        return received

    def spin(self, deadline: float) -> list[Message]:
        """Return the messages that are here, at least one.

        Spins with the GIL released until one comes: the lowest latency, at the price of a whole core.

        Args:
            deadline: seconds from now.

        Raises:
            TransferError: the deadline passed.
            ClosedError: the fabric is closed.
        """
        return self._stream.spin(deadline)

    def __iter__(self) -> MessageStream:
        return self

    def __next__(self) -> Message:
        """Return the next message; raises ClosedError when the fabric is closed."""
        return self.receive()
