"""Reads for callers that hold many of them at once: a full queue of transfers is waited for, not reported.

Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncfabric._api.key import RegionKey
from asyncfabric._api.region import RegionSlice
from asyncfabric.blocking import Fabric, Transfer, wait_all
from asyncfabric.errors import BusyError, FabricError


def submit_read(fabric: Fabric, key: RegionKey, offset: int, destination: RegionSlice) -> Transfer:
    """Submit a read; blocks while as many transfers are in flight as the fabric takes.

    Raises:
        ValueError: outside the key or the region.
        StaleKeyError: the key is known to be dead.
        ClosedError: the fabric or the region is closed.
    """
    while True:
        try:
            return fabric.read(key, offset, destination)
        except BusyError:
            fabric.wait_writable()


def give_up(transfers: Sequence[Transfer]) -> None:
    """Cancel transfers and return when nothing of them touches memory any more; how each ended does not matter."""
    for transfer in transfers:
        transfer.cancel()
    try:
        wait_all(transfers)
    except FabricError:
        pass  # they were given up
