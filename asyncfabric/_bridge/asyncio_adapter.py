"""Parking under asyncio: futures of the loop, and one reader callback on the completion fd that drains the ring.

The reader is added when somebody waits for the first time and stays; while nobody waits the engine is not armed, so the
fd stays silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from asyncfabric._bridge import faults
from asyncfabric._bridge.loop_adapter import PATIENCE, Waiter, is_ready

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

_Result = TypeVar("_Result")


class AsyncioAdapter:
    """Tasks of one asyncio loop that wait for one engine. All methods run on the loop's thread."""

    def __init__(self, dispatcher: CompletionDispatcher, loop: asyncio.AbstractEventLoop) -> None:
        self._dispatcher = dispatcher
        self._engine = dispatcher.engine
        self._loop = loop
        self._fd = dispatcher.engine.completion_fd()
        self._reading = False
        self._armed = False
        self._pumping: asyncio.Handle | None = None
        self._parked = 0  # tasks that wait and were not woken
        self._ready_calls = 0

    def is_here(self) -> bool:
        """Return whether the calling task is of this loop."""
        return asyncio._get_running_loop() is self._loop

    def checkpoint(self) -> Awaitable[None]:
        """Raise a pending cancellation; lets others run now and then."""
        self._ready_calls += 1
        return checkpoint() if self._ready_calls & (PATIENCE - 1) == 0 else checkpoint_if_cancelled()

    async def wait(self, waiter: Waiter) -> None:
        """Return when the waiter is ready.

        Cancellation: raises CancelledError at once.
        """
        if waiter.ready:
            return
        if self._dispatcher.closed:
            raise faults.closed("the fabric")
        future = waiter.handle = self._loop.create_future()
        self._parked += 1
        try:
            if not self._armed:
                self._pump()
            if is_ready(waiter):
                await self.checkpoint()
            else:
                await future
        finally:
            if waiter.handle is not None:  # nobody woke it
                waiter.handle = None
                self._parked -= 1

    async def wait_shielded(self, waiter: Waiter) -> BaseException | None:
        """Return when the waiter is ready; native cancellations, deaf to shields, are kept and returned."""
        interrupt: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while not waiter.ready:
                try:
                    await self.wait(waiter)
                except asyncio.CancelledError as thrown:
                    interrupt = thrown
        return interrupt

    def wake(self, waiter: Waiter) -> None:
        """Set the waiter ready and resolve its future."""
        waiter.ready = True
        future, waiter.handle = waiter.handle, None
        if future is not None:
            self._parked -= 1
            if not future.done():
                future.set_result(None)

    async def uninterrupted(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run `function`; asyncio turns SIGINT into a cancellation of the main task, so nothing is needed."""
        return await function()

    def close(self) -> None:
        """Remove the reader."""
        if self._pumping is not None:
            self._pumping.cancel()
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        self._armed = False
        self._engine.disarm()
        self._dispatcher.drain()
        self._pump()

    def _pump(self) -> None:
        """Drain until the engine agrees to sleep; the last step of everybody who leaves tasks parked."""
        if self._pumping is not None:
            self._pumping.cancel()
            self._pumping = None
        for _attempt in range(4):
            if not self._parked or self._armed or self._dispatcher.closed:
                return
            if not self._reading:
                self._reading = True
                self._loop.add_reader(self._fd, self._readable)
            if self._engine.arm():
                self._armed = True
                return
            self._dispatcher.drain()
        # Completions pour in faster than they are drained: the tasks that were woken must get their turn.
        self._pumping = self._loop.call_soon(self._pump)
