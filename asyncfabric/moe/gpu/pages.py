"""Pages: GPU memory that several processes map, by a handle that travels as a file descriptor. Any thread.

The memory lives as long as somebody maps it: what is stored for a rank that died meets pages, not a fault.
"""

from __future__ import annotations

import os

from asyncfabric._gpu import Driver, memory


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
        self._mapped = False
        grain = memory.granularity(driver, device)
        self.length_bytes: int = -(-length_bytes // grain) * grain
        size = self.length_bytes
        if descriptor is None:
            handle = memory.create(driver, device, size)
        else:
            handle = memory.import_descriptor(driver, descriptor)
        try:
            if descriptor is None:
                self.descriptor = memory.export_descriptor(driver, handle)
            self.address = memory.reserve(driver, size, grain)
            memory.map_handle(driver, self.address, size, handle)
            self._mapped = True
            memory.allow(driver, device, self.address, size)
            if descriptor is None:
                memory.zero(driver, self.address, size)
        except BaseException:
            self.close()
            raise
        finally:
            memory.release(driver, handle)  # the mapping keeps it

    def close_descriptor(self) -> None:
        """Close the descriptor: all who may map the pages have it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        """Unmap; no kernel of this process may use the memory any more."""
        self.close_descriptor()
        if self._mapped:
            memory.unmap(self._driver, self.address, self.length_bytes)
        if self.address:
            memory.free_reserved(self._driver, self.address, self.length_bytes)
        self._mapped, self.address = False, 0
