"""What routers share of load: each sends the others what it assigned to which node, and all choose by the sum.

On the event loop, over the routers' links. A share replaces the one before it, so a router that missed some is right
again with the next one; the share of a router that is gone counts no more.
"""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec
import trio
from msgspec import Meta, Struct

from asyncfabric.actors import Identity, Member, Membership
from asyncfabric.control import Link
from asyncfabric.errors import ClosedError, PeerError
from asyncfabric.unreadable import UNREADABLE

ROLE = "router"
CHANNEL = "router.load"
PAUSE_S = 0.2
"""Between two shares, at least."""
SEND_S = 2.0
MOST_NODES = 8192

_log = logging.getLogger(__name__)


class LoadShare(Struct, frozen=True, array_like=True):
    """How many requests the sender has at which nodes."""

    assigned: Annotated[list[tuple[Identity, Annotated[int, Meta(ge=1, le=1 << 32)]]], Meta(max_length=MOST_NODES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LoadShare)


async def share_load(link: Link, membership: Membership) -> None:
    """Share with the other routers that are members, for ever.

    Cancellation: the others count what was sent last until this router is gone.
    """
    changed = trio.Event()

    async def note_assignments() -> None:
        while True:
            await membership.wait_reassigned()
            changed.set()

    async def note_members() -> None:
        async for _ in membership.views():
            changed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_receive, link, membership)
        nursery.start_soon(note_assignments)
        nursery.start_soon(note_members)
        sent: tuple[dict[Identity, int], set[Identity]] = ({}, set())
        while True:
            await changed.wait()
            changed = trio.Event()
            others = [one for one in membership.members(ROLE, state=None) if one.identity != link.identity]
            now = membership.assignments(), {one.identity for one in others}
            if others and now != sent:
                body = _encoder.encode(LoadShare(list(now[0].items())[:MOST_NODES]))
                sent = now[0], await _send(link, others, body)
                if sent[1] != now[1]:
                    changed.set()  # who did not get it gets the next one
            await trio.sleep(PAUSE_S)


async def _send(link: Link, others: list[Member], body: bytes) -> set[Identity]:
    """Send a share to other routers side by side; return those that it is on its way to."""
    reached = set[Identity]()

    async def send(other: Member) -> None:
        try:
            if await link.connect(other.address) == other.identity:
                await link.send(other.identity, CHANNEL, body)
                reached.add(other.identity)
        except (PeerError, ClosedError, ValueError) as error:
            _log.info("router %s does not get what this one assigned: %s", other.identity, error)

    with trio.move_on_after(SEND_S):
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(send, other)
    return reached


async def _receive(link: Link, membership: Membership) -> None:
    async with link.listen(CHANNEL) as arrivals:
        async for arrival in arrivals:
            if link.role_of(arrival.sender) != ROLE:
                _log.warning("%s shares load and is no router", arrival.sender)
                continue
            try:
                share = _decoder.decode(arrival.body)
            except UNREADABLE as error:
                _log.warning("the load that %s shares cannot be read: %s", arrival.sender, error)
                continue
            membership.share(arrival.sender, dict(share.assigned))
