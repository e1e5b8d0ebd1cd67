"""How a fabric ends: the engine drains what was submitted until nothing is in flight, then its threads are joined.

Runs on the event loop's thread, or in a step of a fabric of threads. INV-2 for the whole fabric: whatever interrupts
the closing, it comes to its end first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._api.region_end import ended_regions, let_go
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.pending import Pending

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


class ClosingCall(Pending):
    """The closing of the engine: drains all that was submitted, unless the task that waits for it is interrupted."""

    __slots__ = ()

    def interrupted(self) -> None:
        """The closing task was cancelled: what is unposted stays unposted (INV-2)."""
        self._dispatcher.engine.submit_close(0, True)


async def close_fabric(dispatcher: CompletionDispatcher, *, drain_all: bool) -> None:
    """Close; the first caller does the work, the others wait for it.

    Args:
        dispatcher: of the fabric.
        drain_all: wait for every submitted transfer first; otherwise what is unposted is cancelled.

    Raises:
        RuntimeError: in another thread or event loop than the fabric's; then nothing was changed.

    Cancellation: what is unposted is cancelled, the rest of the closing is shielded, then it goes on.
    """
    dispatcher.check_loop()
    if dispatcher.closed:
        await dispatcher.checkpoint()
    elif dispatcher.ending is not None:
        await dispatcher.ending.settle()
    else:
        await dispatcher.adapter.uninterrupted(lambda: _close(dispatcher, drain_all))


async def _close(dispatcher: CompletionDispatcher, drain_all: bool) -> None:
    # Set here, under the protection from SIGINT: a fabric that is marked as closing is always closed.
    dispatcher.closing = True
    ending = dispatcher.ending = Pending(dispatcher)
    dispatcher.drain()  # the ring has room for what the closing will report
    call = ClosingCall(dispatcher)
    cookie = dispatcher.next_cookie()
    dispatcher.parked[cookie] = call
    interrupt: BaseException | None = None
    try:
        dispatcher.engine.submit_close(cookie, not drain_all)
    except EngineStatusError:
        del dispatcher.parked[cookie]  # the engine is closed already; joining it below is all that is left
    else:
        interrupt = await _settled(call, drain_all)
    records = ended_regions(dispatcher)
    dispatcher.shut()
    for record, quarantined in records:
        let_go(record, quarantined)
    ending.abandon()
    if interrupt is not None:
        raise interrupt


async def _settled(call: ClosingCall, drain_all: bool) -> BaseException | None:
    """Return when nothing is in flight, with what is to be raised then: Ctrl-C, or a cancellation."""
    if not drain_all:
        interrupt = await call.settle_shielded()
        return interrupt if isinstance(interrupt, KeyboardInterrupt) else None
    try:
        await call.settle()
    except GeneratorExit:
        raise
    except BaseException as thrown:
        return thrown
    return None
