"""The pages of one node: a torch view of registered memory and a shuffled free list.

One task uses the pool; a forward pass on a worker thread may write to the pages of its own lease meanwhile. Page ids
are shuffled on purpose: two nodes never agree on ids by luck, and batches are really scattered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from asyncfabric_services.demo.pair.layout import KvLayout

POISON = 0xFF  # every byte 0xFF is NaN in fp32, fp16 and bf16: a page that was not written cannot go unnoticed


class PagePool:
    """Leases pages of `memory`, whose length is `pool_bytes(layout, pages)`."""

    def __init__(self, layout: KvLayout, pages: int, memory: torch.Tensor, seed: int) -> None:
        """Take the flat uint8 tensor `memory`; `seed` shuffles the free list."""
        if memory.dtype != torch.uint8 or memory.numel() != pool_bytes(layout, pages):
            raise ValueError(
                f"memory must be {pool_bytes(layout, pages)} bytes of uint8, got {memory.numel()} {memory.dtype}"
            )
        self.layout = layout
        self.pages = pages
        shape = (layout.layers, pages, 2, layout.kv_heads, layout.page_tokens, layout.head_dim)
        self._bytes = memory.view(layout.layers, pages, layout.page_bytes)
        self.tensor = memory.view(getattr(torch, layout.dtype)).view(shape)
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)
        self._leased: set[int] = set()

    @property
    def leased(self) -> int:
        """Return how many pages are out; anything but 0 at the end is a leak."""
        return len(self._leased)

    def lease(self, count: int) -> list[int]:
        """Take `count` pages; raises ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._leased.update(taken)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back; raises ValueError for a page that is not out."""
        for page in pages:
            if page not in self._leased:
                raise ValueError(f"page {page} is not leased")
            self._leased.remove(page)
            self._free.append(page)

    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN, so that only what arrives afterwards can be right."""
        self._bytes[:, torch.tensor(pages, dtype=torch.int64)] = POISON


def pool_bytes(layout: KvLayout, pages: int) -> int:
    """Return the length of the region of a pool."""
    return layout.layers * pages * layout.page_bytes
