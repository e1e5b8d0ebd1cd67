"""How a fabric ends: drain what was submitted, tell the engine, wait until nothing is in flight, join its threads.

Runs on the event loop's thread. INV-2 for the whole fabric: whatever interrupts the closing, it comes to its end first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._api.region_end import let_regions_go
from asyncfabric._api.transfer import Transfer
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.pending import Pending

if TYPE_CHECKING:
    from asyncfabric._bridge.stairwell import Stairwell


async def close_fabric(stairwell: Stairwell, *, drain_all: bool) -> None:
    """Close; the first caller does the work, the others wait for it.

    Args:
        stairwell: of the fabric.
        drain_all: wait for every submitted transfer first; otherwise what is unposted is cancelled.

    Cancellation: what is unposted is cancelled, the rest of the closing is shielded, then it goes on.
    """
    if stairwell.closed:
        await stairwell.checkpoint()
    elif stairwell.ending is not None:
        await stairwell.ending.settle()
    else:
        await stairwell.landing.uninterrupted(lambda: _close(stairwell, drain_all))


async def _close(stairwell: Stairwell, drain_all: bool) -> None:
    # Set here, under the protection from SIGINT: a fabric that is marked as closing is always closed.
    stairwell.closing = True
    stairwell.ending = Pending(stairwell)
    interrupt: BaseException | None = None
    if drain_all:
        try:
            await _drain(stairwell)
        except GeneratorExit:
            raise
        except BaseException as thrown:
            interrupt = thrown
            drain_all = False
    later = await _close_engine(stairwell, cancel_unposted=not drain_all)
    if isinstance(later, KeyboardInterrupt):
        raise later
    if interrupt is not None:
        raise interrupt


async def _drain(stairwell: Stairwell) -> None:
    """Wait for the end of every transfer. Bounded by the deadlines of peers; a failed one is its awaiter's business."""
    stairwell.drain()
    for sink in list(stairwell.parked.values()):
        if isinstance(sink, Transfer) and not sink.ended:
            waiter = sink.park()
            waiter.leaving = True  # not one of the tasks whose interest keeps a transfer from being cancelled
            await stairwell.landing.wait(waiter)


async def _close_engine(stairwell: Stairwell, *, cancel_unposted: bool) -> BaseException | None:
    closed = Pending(stairwell)
    cookie = stairwell.next_cookie()
    stairwell.parked[cookie] = closed
    interrupt: BaseException | None = None
    try:
        stairwell.engine.submit_close(cookie, cancel_unposted)
    except EngineStatusError:
        del stairwell.parked[cookie]  # the engine is closed already; joining it below is all that is left
    else:
        interrupt = await closed.settle_shielded()
    let_regions_go(stairwell)
    stairwell.shut()
    stairwell.engine.close()
    if stairwell.ending is not None:
        stairwell.ending.abandon()
    return interrupt
