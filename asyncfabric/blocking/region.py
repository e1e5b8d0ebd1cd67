"""Region of a blocking fabric: registered memory, which any thread may write from, read into, revoke and release.

Any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._api.region import AnyRegion
from asyncfabric._api.region_end import release_region, revoke_region

if TYPE_CHECKING:
    from asyncfabric._bridge.threads import ThreadDispatcher


class Region(AnyRegion):
    """Memory that the engine may move, made by `fabric.register()` or `fabric.allocate()`.

    Slicing `region[a:b]` in bytes gives a RegionSlice; nothing is clamped. The fabric keeps the buffer alive and
    exported until `release()` has returned or the fabric is closed, also when the Region is dropped before: then the
    memory stays registered, and Python warns with ResourceWarning.
    """

    _dispatcher: ThreadDispatcher

    def revoke(self) -> None:
        """Kill every key handed out so far; the memory stays registered, and `key()` makes keys of a new generation.

        Returns when no write under an old key can land any more.
        """
        self._dispatcher.run(revoke_region(self))

    def release(self) -> None:
        """Deregister the memory; returns when nothing can touch it any more. Idempotent.

        A registered buffer is exported no longer then: a bytearray can be resized. Bounded by `config.drain_deadline`;
        Ctrl-C is raised when nothing can touch the memory.

        Raises:
            TransferError: a device may still touch it, so the memory stays pinned until the process ends.
        """
        self._dispatcher.run(release_region(self))
