"""Keys and values of prompts that stay in their pages after the stream: the next prompt that begins alike reads them.

On the event loop. Kept pages are leases of the pool that no request uses; they are given back, those used longest ago
first, as soon as a prompt needs the room. Nothing is copied: a prompt's table names pages of earlier prompts, then its
own. Pages are found by the hashes of whole blocks, and a page is written by one prompt only, before others find it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncfabric import BusyError
from asyncfabric.kv import KvLease, KvPool
from asyncfabric_services.runner.prefix import PromptBlocks


@dataclass(slots=True, eq=False)
class _KeptLease:
    """Pages of one prompt: those found by hash, and how many prompts in progress use them."""

    lease: KvLease
    users: int = 1
    blocks: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """The pages of a prompt in progress.

    Attributes:
        pages: its block table.
        ready: tokens whose keys and values are in it already; fewer than the prompt has.
    """

    pages: NDArray[np.int64]
    ready: int


class PrefixCache:
    """The kept pages of one pool; `keeps` False lends pages and keeps none."""

    def __init__(self, pool: KvPool, *, keeps: bool = True) -> None:
        self._pool = pool
        self._keeps = keeps
        self._leases: dict[_KeptLease, None] = {}  # the one that was used longest ago first
        self._found: dict[bytes, tuple[_KeptLease, int]] = {}

    @property
    def idle(self) -> int:
        """Return how many pages are kept that no prompt in progress uses: they can be leased."""
        return sum(len(kept.lease.pages) for kept in self._leases if not kept.users)

    @asynccontextmanager
    async def hold(self, prompt: Sequence[int]) -> AsyncIterator[HeldPrompt]:
        """Hold the pages of a prompt within the scope; raises what KvPool.lease raises.

        A scope that ends without an error has computed the whole prompt, and others find its pages from then on.
        Earlier pages are used only where the rest is free at once: who waits for pages holds none.

        Cancellation: the place in the pool's queue is given up; pages that were not computed go back.
        """
        size = self._pool.layout.page_tokens
        blocks = PromptBlocks(prompt).of(size) if self._keeps else []
        tables = self._matching(blocks[: (len(prompt) - 1) // size])  # the last token is computed, for its logits
        whole = self._pool.layout.pages_for(len(prompt))
        used = list(dict.fromkeys(kept for kept, _ in tables))
        for kept in used:
            kept.users += 1
        try:
            self._make_room(whole - len(tables))
            lease = self._pool.lease_nowait("prompt", pages=whole - len(tables))
        except BusyError:
            self._leave(used)
            used, tables = [], []
            self._make_room(whole)
            lease = await self._pool.lease("prompt", pages=whole)
        except BaseException:
            self._leave(used)
            raise
        own = _KeptLease(lease)
        try:
            pages = np.concatenate((np.array([page for _, page in tables], np.int64), lease.pages))
            yield HeldPrompt(pages, len(tables) * size)
            for block, page in zip(blocks[len(tables) :], lease.pages.tolist(), strict=False):
                if block not in self._found:  # or a prompt that was computed meanwhile has it
                    self._found[block] = own, page
                    own.blocks.append(block)
        finally:
            if own.blocks:
                self._leases[own] = None
            else:
                lease.release()
            self._leave((own, *reversed(used)))  # a prompt's beginning goes last, without it the rest is not found

    def clear(self) -> None:
        """Give back what no prompt uses."""
        self._make_room(self._pool.pages)

    def _matching(self, blocks: Iterable[bytes]) -> list[tuple[_KeptLease, int]]:
        tables = []
        for block in blocks:
            if (found := self._found.get(block)) is None:
                break
            tables.append(found)
        return tables

    def _leave(self, used: Iterable[_KeptLease]) -> None:
        for kept in used:
            kept.users -= 1
            if kept in self._leases:
                del self._leases[kept]
                self._leases[kept] = None
        while self._pool.queue and self._give_back():
            pass

    def _make_room(self, pages: int) -> None:
        while self._pool.ledger.free < pages and self._give_back():
            pass

    def _give_back(self) -> bool:
        """Give back the lease that was used longest ago; returns whether there was one that nobody uses."""
        for kept in self._leases:
            if not kept.users:
                del self._leases[kept]
                for block in kept.blocks:
                    del self._found[block]
                kept.lease.release()
                return True
        return False
