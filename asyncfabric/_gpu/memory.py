"""Memory by the driver: allocations that other processes open by a descriptor, mapped for a device; pinned host memory.

Any thread on which a context of the device is current. Each step is one function, so that an owner closes exactly the
steps that it has done. Sizes are multiples of `granularity`.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import ClassVar

from asyncfabric._gpu.driver import Driver
from asyncfabric.errors import DeviceError

_POSIX_DESCRIPTOR, _LOCATION_DEVICE, _ALLOCATION_PINNED, _READ_WRITE, _RECOMMENDED = 1, 1, 1, 3, 1
_PORTABLE_MAPPED = 3
_ALREADY_PINNED = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_: ClassVar = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_: ClassVar = [("location", Location), ("flags", c_int)]


def granularity(driver: Driver, device: int) -> int:
    """Return what lengths of shared memory of a device are multiples of, in bytes."""
    grain = c_size_t()
    driver.call("cuMemGetAllocationGranularity", byref(grain), byref(_prop(device)), _RECOMMENDED)
    return grain.value


def create(driver: Driver, device: int, length_bytes: int) -> int:
    """Allocate memory of a device that has no address yet; return its handle."""
    memory = c_ulonglong()
    prop = _prop(device)
    driver.call("cuMemCreate", byref(memory), c_size_t(length_bytes), byref(prop), c_ulonglong(0))
    return memory.value


def import_descriptor(driver: Driver, descriptor: int) -> int:
    """Return a handle to the memory behind a descriptor, which stays the caller's."""
    memory = c_ulonglong()
    driver.call("cuMemImportFromShareableHandle", byref(memory), c_void_p(descriptor), _POSIX_DESCRIPTOR)
    return memory.value


def export_descriptor(driver: Driver, handle: int) -> int:
    """Return a file descriptor of the memory of a handle; the caller closes it."""
    descriptor = c_int(-1)
    memory = c_ulonglong(handle)
    driver.call("cuMemExportToShareableHandle", byref(descriptor), memory, _POSIX_DESCRIPTOR, c_ulonglong(0))
    return descriptor.value


def release(driver: Driver, handle: int) -> None:
    """Give a handle up; mappings keep the memory."""
    driver.call("cuMemRelease", c_ulonglong(handle))


def reserve(driver: Driver, length_bytes: int, alignment: int = 0) -> int:
    """Reserve a range of addresses; return where it begins."""
    at = c_uint64()
    size = c_size_t(length_bytes)
    driver.call("cuMemAddressReserve", byref(at), size, c_size_t(alignment), c_uint64(0), c_ulonglong(0))
    return at.value


def free_reserved(driver: Driver, address: int, length_bytes: int) -> None:
    """Give a range of addresses back, where nothing is mapped any more."""
    driver.call("cuMemAddressFree", c_uint64(address), c_size_t(length_bytes))


def map_handle(driver: Driver, address: int, length_bytes: int, handle: int) -> None:
    """Map the memory of a handle to a reserved range; no device may use it yet."""
    size = c_size_t(length_bytes)
    driver.call("cuMemMap", c_uint64(address), size, c_size_t(0), c_ulonglong(handle), c_ulonglong(0))


def allow(driver: Driver, device: int, address: int, length_bytes: int) -> None:
    """Let a device read and write a mapped range."""
    access = Access(Location(_LOCATION_DEVICE, device), _READ_WRITE)
    driver.call("cuMemSetAccess", c_uint64(address), c_size_t(length_bytes), byref(access), c_size_t(1))


def unmap(driver: Driver, address: int, length_bytes: int) -> None:
    """Unmap a range; the addresses stay reserved."""
    driver.call("cuMemUnmap", c_uint64(address), c_size_t(length_bytes))


def zero(driver: Driver, address: int, length_bytes: int) -> None:
    """Fill memory of a device with zeros and wait until it is done."""
    driver.call("cuMemsetD8_v2", c_uint64(address), ctypes.c_ubyte(0), c_size_t(length_bytes))
    driver.call("cuCtxSynchronize")


def pin(driver: Driver, base: int, length_bytes: int) -> bool:
    """Pin host memory for all contexts of this process; return False where somebody has pinned it already.

    Raises:
        DeviceError: the driver refuses.
    """
    try:
        driver.call("cuMemHostRegister_v2", c_void_p(base), c_size_t(length_bytes), c_uint(_PORTABLE_MAPPED))
    except DeviceError as error:
        if error.raw != _ALREADY_PINNED:
            raise
        return False
    return True


def unpin(driver: Driver, base: int) -> None:
    """Undo `pin`."""
    driver.call("cuMemHostUnregister", c_void_p(base))


def device_address(driver: Driver, base: int) -> int:
    """Return where kernels find a byte of pinned memory."""
    found = c_uint64()
    driver.call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(base), c_uint(0))
    return found.value


def _prop(device: int) -> AllocationProp:
    location = Location(_LOCATION_DEVICE, device)
    return AllocationProp(type=_ALLOCATION_PINNED, handle_types=_POSIX_DESCRIPTOR, location=location)
