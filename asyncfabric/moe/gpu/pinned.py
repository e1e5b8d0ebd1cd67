"""Pinned: host memory that the GPUs of this process reach: parcels of a proxy, and the words of a fabric. Any thread.

Memory that is pinned already, by a rail of the engine for example, stays as it is and is only looked up.
"""

from __future__ import annotations

from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from threading import Lock

import torch

from asyncfabric._cuda_driver import Driver
from asyncfabric.errors import DeviceError
from asyncfabric.moe.gpu.driver import ALREADY_PINNED, PORTABLE_MAPPED

PAGE_BYTES = 4096

_lock = Lock()
_pages: dict[int, _Page] = {}
"""Pages of words by their address: exchanges of one fabric share them. Under the lock."""


class Pinned:
    """A range of host memory; `close` lets it go.

    Attributes:
        address: of the range, for kernels.
    """

    def __init__(self, driver: Driver, device: torch.device, base: int, length_bytes: int) -> None:
        """Pin it.

        Raises:
            DeviceError: the driver refuses.
        """
        self._driver = driver
        self._device = device
        self._base = base
        self._ours = False
        with torch.cuda.device(device):
            try:
                driver.call("cuMemHostRegister_v2", c_void_p(base), c_size_t(length_bytes), c_uint(PORTABLE_MAPPED))
                self._ours = True
            except DeviceError as error:
                if error.raw != ALREADY_PINNED:
                    raise
            self.address: int = device_address(driver, base)

    def close(self) -> None:
        """Unpin; no kernel may use it any more."""
        if self._ours:
            with torch.cuda.device(self._device):
                self._driver.call("cuMemHostUnregister", c_void_p(self._base))
        self._ours = False


@dataclass(slots=True)
class _Page:
    pinned: Pinned
    users: int = 0


class PinnedWord:
    """A word of 8 bytes that kernels load or store; its page is pinned as long as one of its words is in use.

    Attributes:
        address: of the word, for kernels.
    """

    def __init__(self, driver: Driver, device: torch.device, word: int) -> None:
        """Pin the page of a word.

        Raises:
            DeviceError: the driver refuses.
        """
        self._at = word // PAGE_BYTES * PAGE_BYTES
        with _lock:
            if self._at not in _pages:
                _pages[self._at] = _Page(Pinned(driver, device, self._at, PAGE_BYTES))
            page = _pages[self._at]
            page.users += 1
        self.address: int = page.pinned.address + word - self._at

    def close(self) -> None:
        """Give it up; called once."""
        with _lock:
            page = _pages[self._at]
            page.users -= 1
            if page.users == 0:
                _pages.pop(self._at).pinned.close()


def device_address(driver: Driver, base: int) -> int:
    """Return where kernels find a byte of pinned memory; the context must be current."""
    found = c_uint64()
    driver.call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(base), c_uint(0))
    return found.value
