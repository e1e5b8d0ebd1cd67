"""Ring 4 where the machine has RDMA devices: what libraries keep open for the life of the process is opened first.

librdmacm opens every device once and never closes it, so the first test that uses libfabric's verbs would be blamed.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import asyncfabric as af


@pytest.fixture(scope="session", autouse=True)
def rdma_devices_are_open() -> None:
    """Open one rail over librdmacm, where there is a device."""
    present = Path("/sys/class/infiniband")
    if not present.is_dir() or not any(present.iterdir()):
        return

    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=("ofi-verbs",))):
            pass

    try:
        anyio.run(attempt, backend="trio")
    except af.DeviceError:
        return  # the tests state why
