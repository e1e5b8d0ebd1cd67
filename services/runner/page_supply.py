"""Who hands out pages: the protocol that the runner's users need, and a free list that fulfils it in one process.

One task uses a supply. Which memory the pages are in is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from asyncfabric.errors import BusyError


class PageSupply(Protocol):
    """What lends pages to requests."""

    @property
    def pages(self) -> int:
        """Return how many pages there are in all."""

    @property
    def free(self) -> int:
        """Return how many pages can be leased now."""

    def lease(self, count: int) -> list[int]:
        """Take `count` pages; raises BusyError when fewer are free."""

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back."""


class FreeList:
    """Pages 0..`pages`-1, the one that was free longest first: a stale use of a page then shows late, but it shows."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages must be at least 1, got {pages}")
        self._pages = pages
        self._free = list(range(pages))
        self._leased: set[int] = set()

    @property
    def pages(self) -> int:
        """Return how many pages there are in all."""
        return self._pages

    @property
    def free(self) -> int:
        """Return how many pages can be leased now."""
        return len(self._free)

    def lease(self, count: int) -> list[int]:
        """Take `count` pages; raises BusyError when fewer are free."""
        if count > len(self._free):
            raise BusyError(
                f"{count} pages wanted, {len(self._free)} of {self._pages} are free",
                remedy="wait until a request ends, or give the pool more pages",
            )
        taken, self._free = self._free[:count], self._free[count:]
        self._leased.update(taken)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back; raises ValueError for a page that is not out."""
        for page in pages:
            if page not in self._leased:
                raise ValueError(f"page {page} is not leased")
            self._leased.remove(page)
            self._free.append(page)
