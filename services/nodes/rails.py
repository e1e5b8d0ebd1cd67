"""The fabric of a node process, opened over the rails of its settings. On the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncfabric import DeviceError, Fabric, FabricConfig, open_fabric
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import Settings


@asynccontextmanager
async def open_rails(settings: Settings, secret: bytes | None = None) -> AsyncIterator[Fabric]:
    """Open the fabric over `cluster.rails`; with a secret, peers must prove that they have it.

    Raises StartError for a text that names no rail, and for a rail that this machine cannot open; what breaks later is
    raised as it is.

    Cancellation: as of open_fabric.
    """
    fabric: Fabric | None = None
    try:
        config = FabricConfig(rails=tuple(settings.cluster.rails.split(",")), secret=secret)
        async with open_fabric(config) as fabric:
            yield fabric
    except (ValueError, DeviceError) as error:
        if fabric is not None:
            raise
        raise StartError(f"cluster.rails: {error}; `asyncfabric doctor` reports which rails work here") from error
