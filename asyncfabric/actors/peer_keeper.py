"""PeerKeeper: keeps one fabric peer connected for each node of interest: connects, backs off, disconnects the lost.

Runs on the event loop's thread, above no fabric in particular: a protocol has what is needed of one. A node that comes
back under its name is another incarnation, so another peer; nothing of the old one is used for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import trio

from asyncfabric.actors.link import Identity
from asyncfabric.actors.membership import Membership
from asyncfabric.errors import PeerError

logger: logging.Logger = logging.getLogger(__name__)
P = TypeVar("P")
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


class PeerFabric(Protocol[P]):
    """What is needed of a fabric; `asyncfabric.Fabric` has it."""

    async def connect(self, address: bytes, /) -> P:
        """Connect to a fabric. Raises PeerError when it cannot be reached.

        Cancellation: only this wait ends.
        """
        ...

    async def disconnect(self, peer: P, /) -> None:
        """Drop the connection to a peer.

        Cancellation: it is dropped all the same.
        """
        ...


class _Kept(Generic[P]):
    def __init__(self, address: bytes) -> None:
        self.address = address
        self.peer: P | None = None
        self.connected = trio.Event()
        self.broken = trio.Event()
        self.scope = trio.CancelScope()
        self.error: PeerError | None = None


class PeerKeeper(Generic[P]):
    """Peers by node; made by `open_peer_keeper`."""

    def __init__(self, fabric: PeerFabric[P], nursery: trio.Nursery, jitter: Callable[[], float]) -> None:
        """Not for users: use `open_peer_keeper`."""
        self._fabric = fabric
        self._nursery = nursery
        self._jitter = jitter
        self._kept: dict[Identity, _Kept[P]] = {}

    @property
    def kept(self) -> tuple[Identity, ...]:
        """The nodes whose peers are kept connected."""
        return tuple(self._kept)

    def join(self, identity: Identity, address: bytes) -> None:
        """Keep a peer connected from now on; an earlier life of the name, or an earlier address, is dropped."""
        present = self._kept.get(identity)
        if present is not None and present.address == address:
            return
        for other in [one for one in self._kept if one.name == identity.name]:
            self.leave(other)
        kept = self._kept[identity] = _Kept[P](address)
        self._nursery.start_soon(self._keep, identity, kept)

    def leave(self, identity: Identity) -> None:
        """Stop keeping a peer and disconnect it; unknown is no error. Who waits for it gets PeerError."""
        kept = self._kept.pop(identity, None)
        if kept is not None:
            kept.error = PeerError(f"{identity.name} left or was lost", remedy="choose another node")
            kept.connected.set()
            kept.scope.cancel()

    def peer(self, identity: Identity) -> P | None:
        """Return the connected peer of a node, None when it is not connected now."""
        kept = self._kept.get(identity)
        return kept.peer if kept is not None else None

    async def wait_peer(self, identity: Identity) -> P:
        """Return the peer of a node when it is connected.

        Raises:
            PeerError: the node is not kept, or left while this waited.

        Cancellation: only this wait ends.
        """
        await trio.lowlevel.checkpoint()
        kept = self._kept.get(identity)
        if kept is None:
            raise PeerError(f"{identity.name} (this incarnation) is not a known node", remedy="it left or was replaced")
        while kept.peer is None:
            if kept.error is not None:
                raise kept.error
            await kept.connected.wait()
        return kept.peer

    def report_broken(self, identity: Identity) -> None:
        """Note that a transfer failed with PeerError: the peer is disconnected and connected again, with back-off."""
        kept = self._kept.get(identity)
        if kept is not None and kept.peer is not None:
            kept.peer = None
            kept.connected = trio.Event()
            kept.broken.set()

    async def follow(self, membership: Membership) -> None:
        """Keep the peers of all members that have a fabric, as they come and go.

        Cancellation: the peers that are kept stay so.
        """
        async for members in membership.views():
            wanted = {member.identity: member.fabric_address for member in members if member.fabric_address}
            for identity in [one for one in self._kept if one not in wanted]:
                self.leave(identity)
            for identity, address in wanted.items():
                self.join(identity, address)

    async def _keep(self, identity: Identity, kept: _Kept[P]) -> None:
        peer: P | None = None
        pause_s = FIRST_PAUSE_S
        try:
            with kept.scope:
                while True:
                    try:
                        peer = await self._fabric.connect(kept.address)
                    except PeerError as error:
                        logger.info("%s cannot be reached, trying again in %.2f s: %s", identity.name, pause_s, error)
                    except ValueError as error:  # what it states is no address, and will be none
                        logger.warning("%s cannot be reached: %s", identity.name, error)
                        remedy = "do both nodes run the same version?"
                        kept.error = PeerError(
                            f"{identity.name} has no address that can be read: {error}", remedy=remedy
                        )
                        kept.connected.set()
                        return
                    else:
                        kept.broken = trio.Event()
                        kept.peer = peer
                        kept.connected.set()
                        connected_at = trio.current_time()
                        await kept.broken.wait()
                        await self._drop(peer)
                        peer = None
                        if trio.current_time() - connected_at > LONGEST_PAUSE_S:
                            pause_s = FIRST_PAUSE_S
                    await trio.sleep(pause_s * (0.5 + self._jitter() / 2))  # not all nodes at the same moment
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            kept.peer = None
            if peer is not None:
                with trio.CancelScope(shield=True):
                    await self._drop(peer)

    async def _drop(self, peer: P) -> None:
        try:
            await self._fabric.disconnect(peer)
        except PeerError as error:
            logger.info("disconnecting %r: %s", peer, error)


@asynccontextmanager
async def open_peer_keeper(
    fabric: PeerFabric[P], jitter: Callable[[], float] = random.random
) -> AsyncIterator[PeerKeeper[P]]:
    """Open a keeper for the time of an `async with` block; at its end all kept peers are disconnected.

    Args:
        fabric: connects and disconnects; not closed here.
        jitter: returns numbers in [0, 1) that spread the attempts to connect.

    Cancellation: the peers are disconnected, then it goes on.
    """
    raised: Exception | None = None
    async with trio.open_nursery() as nursery:
        keeper = PeerKeeper(fabric, nursery, jitter)
        try:
            yield keeper
        except Exception as error:
            raised = error
        nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised
