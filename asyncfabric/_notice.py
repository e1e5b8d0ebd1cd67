"""Notice: wakes everybody who waits now; who waits later waits for the next one. Event loop's thread."""

from __future__ import annotations

import anyio


class Notice:
    """Something changed, look again. Costs nothing while nobody waits."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Wake who waits."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Return at the next `notify()`.

        Cancellation: only this wait ends.
        """
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
