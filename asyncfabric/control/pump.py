"""A task that serves one edge-triggered fd: it hands over what has come, and tries again what waits for room.

On the event loop's thread; knows no zmq. The fd of a ZeroMQ socket becomes readable when the state of the socket may
have changed, and shows nothing more until the socket was asked; so `wake` exists for whoever asked it meanwhile.
Who reads a socket, or finds it full, asks it too, and may be the only one who learns of room. So
what waits for room is tried again after the reading, and then every RETRY_S.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import anyio
import anyio.lowlevel

BATCH = 256  # messages that one socket hands over before other tasks get a turn
RETRY_S = 0.01  # how long news of room that was taken by somebody else may go unnoticed


class Pump:
    """Serves one socket; `run` is its task.

    `receive` hands over one message and returns False when there is none; `flush` sends what waits for room and returns
    whether something still waits.
    """

    def __init__(
        self, fd: int, receive: Callable[[], bool], flush: Callable[[], bool], release: Callable[[], None]
    ) -> None:
        self.closed: bool = False
        self._fd = fd
        self._receive = receive
        self._flush = flush
        self._release = release
        self._waits = False
        self._woken = anyio.Event()
        self._served = anyio.Event()
        self._scope = anyio.CancelScope(shield=True)  # a link that is cancelled still sends goodbye

    async def run(self) -> None:
        """Serve until closed; then release the socket.

        Cancellation: through `close` only.
        """
        with self._scope:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._wait_for_edges)
                    while True:
                        self._woken = anyio.Event()
                        while self._serve(BATCH):
                            await anyio.lowlevel.checkpoint()
                        self._served.set()
                        with anyio.move_on_after(RETRY_S if self._waits else inf):
                            await self._woken.wait()
            finally:
                self.closed = True
                self._release()

    async def _wait_for_edges(self) -> None:
        while True:
            await anyio.wait_readable(self._fd)
            self._served = anyio.Event()
            self._woken.set()
            await self._served.wait()  # until then the fd may still be readable for what is known

    def _serve(self, limit: int) -> bool:
        """Hand over at most `limit` messages; return whether more may wait."""
        left = limit
        while left and not self.closed and self._receive():
            left -= 1
        self._waits = not self.closed and self._flush()
        return left == 0

    def drain(self) -> None:
        """Hand over all that has come."""
        while self._serve(BATCH):
            pass

    def wake(self) -> None:
        """Look at the socket soon."""
        self._woken.set()

    def close(self) -> None:
        """End the task, which releases the socket."""
        self.closed = True
        self._scope.cancel()
