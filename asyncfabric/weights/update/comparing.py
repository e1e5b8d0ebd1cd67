"""Comparing: checksums that were begun here with those that a sender told."""

from __future__ import annotations

from time import monotonic

from anyio.lowlevel import checkpoint

from asyncfabric.weights.update.device import Sums
from asyncfabric.weights.update.threads import in_thread

SOON_S = 0.0005
"""A device that queues is asked so long, turn by turn, before a thread waits for it."""


def compared(found: Sums, sums: list[int]) -> list[bool]:
    """Return which are equal, once all have been worked out; on any thread."""
    return [mine == told for mine, told in zip(found.result(), sums, strict=True)]


async def compared_soon(found: Sums, sums: list[int]) -> list[bool]:
    """Return the same on the event loop, where a thread would be woken later than the device is done.

    Cancellation: the device goes on; a thread that waits for it is waited for.
    """
    until = monotonic() + SOON_S
    while not found.ready():
        if monotonic() > until:
            return await in_thread(compared, found, sums)
        await checkpoint()
    return compared(found, sums)
