"""asyncfabric.weights.blocking: weights in three calls, for programs without an event loop. Needs torch.

    with open_sender(model, StoreJoin(store)) as sender:        # each rank of a training
        sender.publish(version)

    with open_receiver(model, StoreJoin(store)) as receiver:    # each rank of an engine
        if receiver.poll():
            receiver.apply()                                    # between two steps

The updates run on an event loop of their own, in a thread that lives as long as the block; bytes are moved by the
engine, as always. Calls come from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import anyio
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncfabric.errors import BusyError
from asyncfabric.weights import sessions
from asyncfabric.weights.sender.version import PublishReport
from asyncfabric.weights.sessions import (
    CONVERSIONS,
    Conversion,
    DirectoryJoin,
    Join,
    LocalJoin,
    Meeting,
    StoreJoin,
)
from asyncfabric.weights.sessions.sender import NamedTensors

__all__ = [
    "CONVERSIONS",
    "BlockingReceiver",
    "BlockingSender",
    "Conversion",
    "DirectoryJoin",
    "Join",
    "LocalJoin",
    "Meeting",
    "StoreJoin",
    "open_receiver",
    "open_sender",
]


class BlockingSender:
    """One rank of a training; made by `with open_sender(...)`."""

    def __init__(self, portal: BlockingPortal, sender: sessions.WeightSender) -> None:
        """Not for users: `with open_sender(...)`."""
        self._portal = portal
        self._sender = sender
        self._under_way: Future[PublishReport] | None = None

    def publish(self, version: int, *, wait: bool = True) -> PublishReport | None:
        """Bring the weights to every engine as this version; see `WeightSender.publish`.

        Args:
            version: later than all before, the same at every rank.
            wait: False returns at once, and `wait()` reports the outcome. Until then the weights must not change: the
                next forward and backward passes may run, an optimizer's step may not.

        Returns:
            The report; None where it is not waited for.

        Raises:
            BusyError: another version is being published, or `wait()` was not called for one.
            BrokenError: the version was aborted.
        """
        if self._under_way is not None:
            raise BusyError("a version is being published; call wait() before the next one")
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the event loop's thread has a current stream of its own
        self._under_way = self._portal.start_task_soon(self._sender.publish, version)
        return self.wait() if wait else None

    def wait(self) -> PublishReport:
        """Return the report of the version that `publish(wait=False)` began, when it is decided.

        Raises:
            RuntimeError: none was begun.
            BrokenError: the version was aborted.
        """
        if self._under_way is None:
            raise RuntimeError("no version is being published")
        try:
            return self._under_way.result()
        finally:
            if self._under_way.done():
                self._under_way = None

    def _end(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()


class BlockingReceiver:
    """One rank of an engine; made by `with open_receiver(...)`."""

    def __init__(self, portal: BlockingPortal, receiver: sessions.WeightReceiver) -> None:
        """Not for users: `with open_receiver(...)`."""
        self._portal = portal
        self._receiver = receiver

    @property
    def version(self) -> int:
        """The version that is in the engine's tensors, 0 for none."""
        return self._receiver.version

    def poll(self) -> int:
        """Return the version that `apply` would bring, 0 while there is none. Does not wait for the loop."""
        return self._receiver.poll()

    def wait(self, deadline: float | None = None) -> int:
        """Wait for a newer version, and return it.

        Args:
            deadline: seconds from now; None waits as long as it takes.

        Raises:
            ClosedError: no more versions come, as when the store is gone; the engine keeps what it has.
            TimeoutError: the deadline passed.
        """
        return self._portal.call(self._wait, deadline)

    def apply(self, stream: torch.cuda.Stream | None = None, *, deadline: float | None = None) -> int:
        """Bring the newest version into the engine's tensors, between two steps; return which one they have.

        From a shadow the calling thread copies what is complete, on its current CUDA stream, or on `stream` without
        waiting for it; see `WeightReceiver.apply`. In place (`shadow="none"`) the version that waits comes into the
        tensors, and nothing may use them until this has returned; see `WeightReceiver.apply_in_place`.

        Args:
            stream: of the tensors' GPU.
            deadline: in place: seconds from now until the version is whole; None waits as long as it takes.

        Raises:
            BrokenError: in place: the version was cut off; `version` is 0, and the tensors hold parts of several
                versions until a later call has brought a whole one.
            TimeoutError: the deadline passed: bytes go on coming, and the engine stays paused until a later call has
                returned or raised BrokenError.
        """
        self._receiver.settle()
        if self._receiver.in_place:
            return self._receiver.copy(self._portal.call(self._begin_in_place, deadline), stream)
        return self._receiver.copy(self._portal.call(self._receiver.begin_apply), stream)

    def take(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the newest complete version, for an engine that copies them by itself.

        They lie where the version arrived, and stay as they are until the next `take` or `apply`; see
        `WeightReceiver.take`.
        """
        self._receiver.settle()
        return self._portal.call(self._receiver.take)

    async def _begin_in_place(self, deadline: float | None) -> int:
        with anyio.fail_after(deadline):
            return await self._receiver.begin_in_place()

    async def _wait(self, deadline: float | None) -> int:
        with anyio.fail_after(deadline):
            return await self._receiver.wait()


@contextmanager
def open_sender(named: NamedTensors, join: Meeting, **options: Any) -> Iterator[BlockingSender]:
    """Open one rank of a training; arguments and errors as `asyncfabric.weights.sessions.open_sender`."""
    with start_blocking_portal(backend="trio") as portal:
        opened = portal.wrap_async_context_manager(sessions.open_sender(named, join, **options))
        with opened as sender:
            blocking = BlockingSender(portal, sender)
            try:
                yield blocking
            finally:
                blocking._end()


@contextmanager
def open_receiver(named: NamedTensors, join: Meeting, **options: Any) -> Iterator[BlockingReceiver]:
    """Open one rank of an engine; arguments and errors as `asyncfabric.weights.sessions.open_receiver`."""
    with start_blocking_portal(backend="trio") as portal:
        opened = portal.wrap_async_context_manager(sessions.open_receiver(named, join, **options))
        with opened as receiver:
            yield BlockingReceiver(portal, receiver)
