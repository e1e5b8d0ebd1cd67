"""The CUDA driver as far as kernels and shared pages need it: libcuda by ctypes, opened when the first exchange is.

Any thread on which torch has made the device's context current. No policy.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from asyncfabric.errors import DeviceError

POSIX_DESCRIPTOR, LOCATION_DEVICE, ALLOCATION_PINNED, READ_WRITE, RECOMMENDED = 1, 1, 1, 3, 1
PORTABLE_MAPPED, ALREADY_PINNED = 3, 712
DYNAMIC_SHARED_BYTES, SHARED_SHARE = 8, 9
MULTIPROCESSORS, VMM, POSIX_HANDLES, MAJOR = 16, 102, 103, 75


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Driver:
    """Calls of libcuda; each raises DeviceError where the driver refuses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Use an open library."""
        self._library = library
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            DeviceError: it did not succeed.
        """
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            name_of = (text.value or b"unknown error").decode()
            raise DeviceError(f"{name}: {name_of} ({result})", raw=result)

    def attribute(self, device: int, number: int) -> int:
        """Return an attribute of a device."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, ctypes.c_int(device))
        return value.value


@functools.cache
def open_driver() -> Driver:
    """Return the driver of this process.

    Raises:
        DeviceError: there is none, or no GPU.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"the NVIDIA driver's library could not be opened ({error})",
            remedy="it comes with the driver of a machine that has a GPU",
        ) from error
    return Driver(library)
