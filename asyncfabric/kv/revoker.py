"""KeyRevoker: revokes all keys to a pool, so that pages whose writers gave no proof can be used again.

Runs on the event loop's thread, in a task of its own beside the pool. Disconnecting a source stops its next writes, but
only a revocation returns with the promise that none can arrive any more; and it ends the writes of every source. So
this fences when pages are quarantined and nobody receives; when that moment does not come by itself, new leases
wait.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import anyio

from asyncfabric import FabricError, Region
from asyncfabric.kv.ledger import PageLedger

logger: logging.Logger = logging.getLogger("asyncfabric.kv")

QUARANTINE_PATIENCE_S = 5.0
"""How long quarantined pages wait for a moment without receiving leases before new leases wait for it too."""

FENCE_RETRY_S = 0.25


class KeyRevoker:
    """Fences one pool.

    Attributes:
        fences, failed_fences: how often that was tried.
    """

    def __init__(self, ledger: PageLedger, pages: Region, contexts: Region | None) -> None:
        """Not for users: a pool has one."""
        self._ledger = ledger
        self._regions = [pages] if contexts is None else [pages, contexts]
        self.fences: int = 0
        self.failed_fences: int = 0
        self._oldest_quarantine = math.inf
        self._wanted = anyio.Event()
        self._opened = anyio.Event()
        self._lock = anyio.Lock()

    async def fence(self) -> frozenset[int]:
        """Revoke, then free what was quarantined; returns the leases that were receiving and will get nothing more.

        Raises:
            FabricError: the engine could not promise that nothing lands any more; nothing is freed.

        Cancellation: only the wait ends; nothing is freed.
        """
        async with self._lock:
            self._ledger.fence_begin()
            try:
                for region in self._regions:
                    await region.revoke()
            except BaseException:
                self.failed_fences += 1
                self._wanted.set()
                raise
            interrupted = self._ledger.fence_end()
            self.fences += 1
            self.freed()
            self._opened.set()
            self._opened = anyio.Event()
        return interrupted

    async def until_open(self) -> None:
        """Return when pages may be exposed.

        Cancellation: only this wait ends.
        """
        while self._ledger.fencing:
            await self._opened.wait()

    async def guard(self, fence: Callable[[], Awaitable[None]]) -> None:
        """Fence whenever pages are quarantined and nobody receives; for ever.

        Cancellation: a fence under way is left to the engine; nothing is freed.
        """
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            if not (self._ledger.fencing or (self._ledger.quarantined and not self._ledger.exposed)):
                continue
            try:
                await fence()
            except FabricError as error:
                level = logging.WARNING if self.failed_fences == 1 else logging.DEBUG
                logger.log(level, "fencing a pool failed, nothing can be received until it succeeds: %s", error)
                await anyio.sleep(FENCE_RETRY_S)

    def look(self) -> None:
        """Something changed: look whether it is time to fence."""
        self._wanted.set()

    def quarantined(self) -> None:
        """Pages were quarantined just now."""
        self._oldest_quarantine = min(self._oldest_quarantine, anyio.current_time())

    def freed(self) -> None:
        """Quarantined pages came back."""
        if not self._ledger.quarantined:
            self._oldest_quarantine = math.inf

    def holds_back(self) -> bool:
        """Return whether new leases have to wait: a fence is under way, or is overdue for want of a quiet moment."""
        return self._ledger.fencing or anyio.current_time() - self._oldest_quarantine > QUARANTINE_PATIENCE_S

    def close(self) -> None:
        """Wake the tasks that wait to expose; they find the pool closed."""
        self._ledger.fence_end()
        self._opened.set()
