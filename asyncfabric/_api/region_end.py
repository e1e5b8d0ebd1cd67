"""How registered memory ends: revoked keys, release, and the owners that are pinned when a device cannot be trusted.

Runs on the event loop's thread, or in a step of a fabric of threads. The owner of the memory is let go only after the
engine reported that nothing can touch it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._api.control import submit_control
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.quarantine import pin_for_good
from asyncfabric._bridge.status import StatusCode

if TYPE_CHECKING:
    from asyncfabric._api.region import AnyRegion
    from asyncfabric._api.region_record import RegionRecord
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


async def revoke_region(region: AnyRegion) -> None:
    """Begin a new generation of the region's keys.

    Cancellation: the revocation goes on; only the wait for it ends.
    """
    region._check_open()
    dispatcher = region._dispatcher
    call = submit_control(dispatcher, f"revoking the keys of {region!r}", dispatcher.engine.submit_revoke, region._id)
    await call.wait()


async def release_region(region: AnyRegion) -> None:
    """Deregister, wait until nothing can touch the memory, then let its owner go.

    Cancellation: shielded until the engine answered, then it goes on.
    """
    dispatcher = region._dispatcher
    dispatcher.check_loop()
    ending = dispatcher.releases.get(region._id)
    if ending is None:
        if region._released or dispatcher.closing:
            region._released = True
            if dispatcher.ending is not None:
                await dispatcher.ending.settle()  # closing the fabric releases everything
            else:
                await dispatcher.checkpoint()
            return
        what = f"releasing {region!r}"
        ending = submit_control(dispatcher, what, dispatcher.engine.submit_release, region._id)
        region._released = True
        dispatcher.releases[region._id] = ending
    try:
        await ending.settle()
    finally:
        if ending.ended and dispatcher.releases.pop(region._id, None) is not None:
            completion = ending.completion
            record = dispatcher.regions.pop(region._id, None)
            if record is not None:
                let_go(record, completion is not None and completion.code == StatusCode.DRAIN_TIMEOUT)
    if ending.completion is not None and ending.completion.code:
        raise faults.failed(ending.completion, faults.FailedCall(ending.what), ending.detail)


def ended_regions(dispatcher: CompletionDispatcher) -> list[tuple[RegionRecord, bool]]:
    """At the end of a fabric: forget every region; return what to let go, and whether a device may still touch it."""
    regions = dict(dispatcher.regions)
    dispatcher.regions.clear()
    return [(record, _quarantined(dispatcher, region_id)) for region_id, record in regions.items()]


def let_go(record: RegionRecord, quarantined: bool) -> None:
    """Let the owner of released memory go; pin it when a device may still touch it."""
    if quarantined:
        pin_for_good(record)
    else:
        record.let_go()


def _quarantined(dispatcher: CompletionDispatcher, region_id: int) -> bool:
    try:
        return dispatcher.engine.region_info(region_id).quarantined
    except EngineStatusError:
        return False  # released meanwhile
