"""Which GPU this process uses, found without making a context and without loading the driver: a look, by ctypes.

Any thread; the thread's own current context decides where several are there. Costs microseconds.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from asyncfabric._bridge.choice import GpuInUse

_SUCCESS = 0
_ADDRESS_BYTES = 32


def gpu_in_use() -> GpuInUse | None:
    """Return the GPU of the current context, else the first with a primary context; None where the process has none."""
    try:
        # Only what the process has loaded: a program without a GPU must not pay for the driver.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return find_in_use(driver)


def find_in_use(driver: Any) -> GpuInUse | None:
    """Ask an open libcuda. One that was not initialised refuses each call, and no context can be there."""
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return None
    current = _current(driver)
    for ordinal in range(count.value) if current is None else (current,):
        if current is not None or _has_context(driver, ordinal):
            return GpuInUse(ordinal, _address(driver, ordinal))
    return None


def _current(driver: Any) -> int | None:
    context, device = ctypes.c_void_p(), ctypes.c_int()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) != _SUCCESS or not context.value:
        return None
    return device.value if driver.cuCtxGetDevice(ctypes.byref(device)) == _SUCCESS else None


def _has_context(driver: Any, ordinal: int) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    state = driver.cuDevicePrimaryCtxGetState(ctypes.c_int(ordinal), ctypes.byref(flags), ctypes.byref(active))
    return bool(state == _SUCCESS and active.value)


def _address(driver: Any, ordinal: int) -> str:
    text = ctypes.create_string_buffer(_ADDRESS_BYTES)
    known = driver.cuDeviceGetPCIBusId(text, _ADDRESS_BYTES, ctypes.c_int(ordinal)) == _SUCCESS
    return text.value.decode().lower() if known else ""
