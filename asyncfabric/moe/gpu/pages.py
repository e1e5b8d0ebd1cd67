"""Pages: GPU memory that several processes map, by a handle that travels as a file descriptor. Any thread.

The memory lives as long as somebody maps it: what is stored for a rank that died meets pages, not a fault.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p

from asyncfabric._cuda_driver import Driver
from asyncfabric.moe.gpu.driver import (
    ALLOCATION_PINNED,
    LOCATION_DEVICE,
    POSIX_DESCRIPTOR,
    READ_WRITE,
    RECOMMENDED,
    Access,
    AllocationProp,
    Location,
)


class Pages:
    """Memory mapped for one GPU of this process: own pages, or those of another rank.

    Attributes:
        address: where it is mapped; 0 once closed.
        length_bytes: of the mapping, a multiple of the device's granularity.
        descriptor: of the handle, for own pages; -1 otherwise.
    """

    def __init__(self, driver: Driver, device: int, length_bytes: int, descriptor: int | None = None) -> None:
        """Allocate zeroed pages on a device, or map those of a descriptor, which stays the caller's, for it.

        Raises:
            DeviceError: no memory left, or the device cannot reach the other one's.
        """
        self._driver = driver
        self.address: int = 0
        self.descriptor: int = -1
        self._reserved = False
        location = Location(LOCATION_DEVICE, device)
        prop = AllocationProp(type=ALLOCATION_PINNED, handle_types=POSIX_DESCRIPTOR, location=location)
        grain = c_size_t()
        driver.call("cuMemGetAllocationGranularity", byref(grain), byref(prop), RECOMMENDED)
        self.length_bytes: int = -(-length_bytes // grain.value) * grain.value
        size, memory = c_size_t(self.length_bytes), c_ulonglong()
        if descriptor is None:
            driver.call("cuMemCreate", byref(memory), size, byref(prop), c_ulonglong(0))
        else:
            driver.call("cuMemImportFromShareableHandle", byref(memory), c_void_p(descriptor), POSIX_DESCRIPTOR)
        try:
            if descriptor is None:
                exported = c_int(-1)
                driver.call("cuMemExportToShareableHandle", byref(exported), memory, POSIX_DESCRIPTOR, c_ulonglong(0))
                self.descriptor = exported.value
            at = c_uint64()
            driver.call("cuMemAddressReserve", byref(at), size, c_size_t(grain.value), c_uint64(0), c_ulonglong(0))
            self.address = at.value
            driver.call("cuMemMap", at, size, c_size_t(0), memory, c_ulonglong(0))
            self._reserved = True
            access = Access(location, READ_WRITE)
            driver.call("cuMemSetAccess", at, size, byref(access), c_size_t(1))
            if descriptor is None:
                driver.call("cuMemsetD8_v2", at, ctypes.c_ubyte(0), size)
                driver.call("cuCtxSynchronize")
        except BaseException:
            self.close()
            raise
        finally:
            driver.call("cuMemRelease", memory)  # the mapping keeps it

    def close_descriptor(self) -> None:
        """Close the descriptor: all who may map the pages have it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        """Unmap; no kernel of this process may use the memory any more."""
        self.close_descriptor()
        size = c_size_t(self.length_bytes)
        if self._reserved:
            self._driver.call("cuMemUnmap", c_uint64(self.address), size)
        if self.address:
            self._driver.call("cuMemAddressFree", c_uint64(self.address), size)
        self._reserved, self.address = False, 0
