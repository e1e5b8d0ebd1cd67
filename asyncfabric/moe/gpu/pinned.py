"""Pinned: host memory that the GPUs of this process reach: parcels of a proxy, and the words of a fabric. Any thread.

Memory that is pinned already, by a rail of the engine for example, stays as it is and is only looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch

from asyncfabric._gpu import Driver, memory

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
        with torch.cuda.device(device):
            self._ours = memory.pin(driver, base, length_bytes)
            self.address: int = memory.device_address(driver, base)

    def close(self) -> None:
        """Unpin; no kernel may use it any more."""
        if self._ours:
            with torch.cuda.device(self._device):
                memory.unpin(self._driver, self._base)
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
