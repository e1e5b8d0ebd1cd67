"""Which GPU this process uses, found without making a context and without loading the driver.

Any thread; the thread's own current context decides where several are there. Costs microseconds.
"""

from __future__ import annotations

from asyncfabric._bridge.choice import GpuInUse
from asyncfabric._gpu import Driver, loaded_driver
from asyncfabric.errors import DeviceError


def gpu_in_use() -> GpuInUse | None:
    """Return the GPU of the current context, else the first with a primary context; None where the process has none."""
    driver = loaded_driver()  # only what the process has loaded: a program without a GPU must not pay for the driver
    return None if driver is None else find_in_use(driver)


def find_in_use(driver: Driver) -> GpuInUse | None:
    """Ask the driver. One that was not initialised refuses each call, and no context can be there."""
    try:
        count = driver.count()
    except DeviceError:
        return None
    current = driver.current_device()
    for ordinal in range(count) if current is None else (current,):
        if current is not None or driver.has_context(ordinal):
            return GpuInUse(ordinal, driver.pci_address(ordinal))
    return None
