"""Driver: libcuda, its devices and contexts; what the driver refuses is a DeviceError with the driver's name for it.

Any thread. What needs a context uses the one that is current: torch makes it, or `enter`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import byref, c_int, c_uint, c_void_p
from typing import Any

from asyncfabric.errors import DeviceError

LIBRARY = "libcuda.so.1"
MULTIPROCESSORS, MAJOR = 16, 75
"""Numbers of CUdevice_attribute."""

_ADDRESS_BYTES = 32


class Driver:
    """Calls of an open libcuda."""

    def __init__(self, library: Any) -> None:
        """Use a library; nothing is called."""
        self._library = library

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function of the driver and return its CUresult: 0 for success."""
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            DeviceError: it did not succeed; `raw` is the CUresult.
        """
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, byref(text))
            name_of = (text.value or b"unknown error").decode()
            raise DeviceError(f"{name.partition('_v')[0]}: {name_of} ({result})", raw=result)

    def count(self) -> int:
        """Return how many devices there are.

        Raises:
            DeviceError: the driver was not initialised.
        """
        found = c_int()
        self.call("cuDeviceGetCount", byref(found))
        return found.value

    def attribute(self, device: int, number: int) -> int:
        """Return an attribute of a device, by its number in CUdevice_attribute.

        Raises:
            DeviceError: no such device, or a driver that does not know the attribute.
        """
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, c_int(device))
        return value.value

    def pci_address(self, device: int) -> str:
        """Return the PCI address of a device in lower case, "" where the driver does not give it."""
        text = ctypes.create_string_buffer(_ADDRESS_BYTES)
        known = self.status("cuDeviceGetPCIBusId", text, _ADDRESS_BYTES, c_int(device)) == 0
        return text.value.decode().lower() if known else ""

    def reaches(self, device: int, other: int) -> bool:
        """Return whether a device reaches the memory of another."""
        can = c_int()
        return self.status("cuDeviceCanAccessPeer", byref(can), c_int(device), c_int(other)) == 0 and can.value == 1

    def current_device(self) -> int | None:
        """Return the device of the thread's current context; None without one. Makes no context."""
        context, device = c_void_p(), c_int()
        if self.status("cuCtxGetCurrent", byref(context)) or not context.value:
            return None
        return None if self.status("cuCtxGetDevice", byref(device)) else device.value

    def has_context(self, device: int) -> bool:
        """Return whether the process has the primary context of a device. Makes none."""
        flags, active = c_uint(), c_int()
        refused = self.status("cuDevicePrimaryCtxGetState", c_int(device), byref(flags), byref(active))
        return not refused and bool(active.value)

    def enter(self, device: int) -> None:
        """Make the primary context of a device current in this thread; it stays as long as the process.

        Raises:
            DeviceError: the driver refuses.
        """
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
        self.call("cuCtxSetCurrent", context)


@functools.cache
def open_driver() -> Driver:
    """Load the driver into this process, initialise it and return it: one for the process.

    Raises:
        DeviceError: there is none, or no GPU.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"the NVIDIA driver's library could not be opened ({error})",
            remedy="it comes with the driver of a machine that has a GPU",
        ) from error
    driver = Driver(library)
    driver.call("cuInit", 0)
    return driver


def loaded_driver() -> Driver | None:
    """Return the driver if this process has loaded it, else None. Neither loads nor initialises it."""
    try:
        return Driver(ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    except OSError:
        return None
