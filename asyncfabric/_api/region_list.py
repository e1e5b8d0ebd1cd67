"""The registered regions of a fabric as values: size, place, generation, age and what registering cost.

Runs on the event loop's thread. Who owns a region is not known here: a fabric has no names for its users.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.types import RegionInfo

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


def list_regions(dispatcher: CompletionDispatcher) -> tuple[RegionInfo, ...]:
    """Return the regions, the oldest first; those whose release has begun are still in until it has ended."""
    rows = []
    now = monotonic()  # once: what is older is reported as older
    for record in tuple(dispatcher.regions.values()):
        try:
            known = dispatcher.engine.region_info(record.id)
        except EngineStatusError:
            continue  # released a moment ago; its completion waits in the ring
        rows.append(
            RegionInfo(
                record.id,
                record.length,
                record.device,
                record.access,
                known.generation,
                bool(known.quarantined),
                now - record.since,
                record.cost_s,
                known.refused,
            )
        )
    return tuple(rows)
