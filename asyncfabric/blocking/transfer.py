"""Transfer of a blocking fabric: one submitted op that any number of threads may look at and wait for.

Any thread. A passed deadline and Ctrl-C end the wait and nothing else: the transfer goes on, and the fabric keeps its
memory alive (INV-2). wait() that returns, or raises anything else, means that nothing touches the memory any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncfabric._api.checks import checked_iterable
from asyncfabric._api.transfer import AnyTransfer
from asyncfabric.blocking.deadlines import until
from asyncfabric.types import TransferResult

if TYPE_CHECKING:
    from asyncfabric._bridge.threads import ThreadDispatcher


class Transfer(AnyTransfer):
    """One submitted transfer, made by the calls of Fabric.

    Waiting is optional: the fabric drains what nobody waited for when it closes, and keeps the buffers alive till then.
    """

    __slots__ = ()

    _dispatcher: ThreadDispatcher

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, well or badly; a look brings on what is under way."""
        if self.completion is not None:
            return True
        if not self.abandoned and self._dispatcher.look() and not self.ended:
            self._dispatcher.assist()  # what was there to take was of others, as of messages that came
        return self.ended

    @property
    def has_ended(self) -> bool:
        """Whether the transfer is known to have ended. Unlike `done` it brings nothing on.

        What is submitted before anything looks leaves together.
        """
        if self.completion is None and not self.abandoned:
            self._dispatcher.drain()
        return self.ended

    def wait(self, deadline: float | None = None) -> TransferResult:
        """Block until the transfer has ended and return its result; any number of threads, any number of times.

        Args:
            deadline: seconds from now; None waits as long as it takes, 0 only looks.

        Raises:
            TimeoutError: it has not ended by then. It goes on and may still use its memory: wait again, or `cancel()`
                it and wait.
            TransferError, PeerError, DeviceError, StaleKeyError: how it ended.
            ClosedError: the fabric was closed before its end was known.
        """
        if self.completion is None:
            limit = until(deadline)
            try:
                self._dispatcher.wait_for(self, limit)
            except TimeoutError:
                raise TimeoutError(
                    f"{self.describe()} has not ended after {deadline:g} s: {self.bytes} of {self._total} bytes left, "
                    "and it goes on: wait again, or cancel() it and wait until its memory is free"
                ) from None
        return self._result or self.result()


def wait_all(transfers: Iterable[Transfer], deadline: float | None = None) -> list[TransferResult]:
    """Block until every transfer has ended and return their results in order.

    Args:
        transfers: of one fabric or of several.
        deadline: seconds from now for all of them; None waits as long as it takes.

    Raises:
        TypeError: something else than transfers; then nothing was waited for.
        TimeoutError: some have not ended by then. They go on.
        TransferError, PeerError, DeviceError, StaleKeyError: the first failure in the order given, when all have ended.
    """
    if isinstance(transfers, Transfer):
        raise TypeError("wait_all() takes a list of transfers; one is waited for by its wait()")
    everything = list(checked_iterable("transfers", transfers, "transfers"))
    for transfer in everything:
        if not isinstance(transfer, Transfer):
            raise TypeError(
                f"wait_all() takes Transfers of a blocking fabric, got {type(transfer).__name__} {transfer!r}"
            )
    limit = until(deadline)
    for transfer in everything:
        if transfer.completion is None:
            try:
                transfer._dispatcher.wait_for(transfer, limit)
            except TimeoutError:
                open_ones = [one for one in everything if not one.ended]
                raise TimeoutError(
                    f"{len(open_ones)} of {len(everything)} transfers have not ended after {deadline:g} s and go on, "
                    f"first {open_ones[0] if open_ones else transfer!r}"
                ) from None
    return [transfer.result() for transfer in everything]
