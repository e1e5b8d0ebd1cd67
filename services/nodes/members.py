"""A node's view of who is in the cluster, kept up to date, and waiting for somebody to be gone. On the event loop."""

from __future__ import annotations

from collections.abc import Callable

from asyncfabric.actors import MemberChange, Membership, member_changes
from asyncfabric.control import DirectoryClient


async def follow(directory: DirectoryClient, *takers: Callable[[MemberChange], None]) -> None:
    """Hand each change that the directory reports to the takers, such as `Membership.apply`, for ever.

    Cancellation: what was taken stays.
    """
    while True:  # a watch that fell too far behind ends, and a new one begins with everybody who is in
        async with directory.watch() as changes:
            async for change in member_changes(changes):
                for take in takers:
                    take(change)


async def until_gone(membership: Membership, fabric_address: bytes) -> None:
    """Return when the node with this fabric was in and is not any more: it left, died, or stands still.

    One that the view has not seen yet is not gone: others may know it earlier than we do.

    Cancellation: only this wait ends.
    """
    seen = False
    async for members in membership.views():
        there = any(member.fabric_address == fabric_address for member in members)
        if seen and not there:
            return
        seen = there
