"""Memory that a device may still touch although everybody gave up waiting: pinned until the process ends (INV-2).

Any thread. The engine keeps its own mapping; this list keeps the Python owners of such memory alive, also after their
fabric was closed, so that no allocator hands the bytes to somebody else.
"""

from __future__ import annotations

_PINNED: list[object] = []


def pin_for_good(keepalive: object) -> None:
    """Keep the owner of quarantined memory alive until the process ends."""
    _PINNED.append(keepalive)


def pinned() -> tuple[object, ...]:
    """Return the owners that are kept, oldest first."""
    return tuple(_PINNED)
