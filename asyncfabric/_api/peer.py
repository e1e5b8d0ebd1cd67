"""Peer, PeerGroup and what warming them up reported.

Runs on the event loop's thread. A Peer is a name for one incarnation of another fabric (or of our own); it stays
valid as a name after the peer died.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.checks import checked_iterable
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.errors import ClosedError
from asyncfabric.types import PeerStatistics

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

PEER_STATES = ("connecting", "connected", "lost", "disconnected")
LOST, DISCONNECTED = 2, 3
GONE = (LOST, DISCONNECTED)


class Peer:
    """One incarnation of a fabric that this one talks to; made by `fabric.connect()` or by a message from it."""

    __slots__ = ("__weakref__", "_address", "_dispatcher", "_gone", "_id", "_incarnation")

    def __init__(
        self, dispatcher: CompletionDispatcher, peer_id: int, incarnation: int, address: FabricAddress | None
    ) -> None:
        """Not for users: use `fabric.connect()`."""
        self._dispatcher = dispatcher
        self._id = peer_id
        self._incarnation = incarnation
        self._address = address
        self._gone = False  # it was lost and, as far as anybody looked, did not come back

    @property
    def id(self) -> int:
        """Number of the peer in this fabric."""
        return self._id

    @property
    def incarnation(self) -> int:
        """Random number of the peer's life, as in its address and its keys; 0 when the engine does not report."""
        return self._incarnation

    @property
    def address(self) -> FabricAddress | None:
        """The address that was connected to; None for a peer that connected to us."""
        return self._address

    @property
    def lost(self) -> bool:
        """Whether nothing more comes from the peer, as far as is known: it died, stopped answering or closed."""
        dispatcher = self._dispatcher
        if not dispatcher.closed:
            try:
                self._gone = not lives(dispatcher.engine.peers(), self._id)
            except EngineStatusError:
                pass  # another thread closed the fabric: it is as it was known last
        return self._gone

    def statistics(self) -> PeerStatistics:
        """Return the peer as the engine sees it. Raises ClosedError when the fabric is closed or the peer forgotten."""
        if not self._dispatcher.closed:
            with faults.closed_meanwhile(self):
                for row in self._dispatcher.engine.peers():
                    if row["id"] == self._id:
                        return peer_statistics(row)
        raise ClosedError(f"{self!r} is not known any more", remedy="connect to its address again")

    def __repr__(self) -> str:
        return f"<Peer {faults.short_id(self._id)}: {self._incarnation:016x}>"


class PeerGroup:
    """Peers that are signalled together, `fabric.barrier(group, imm)`; may be empty. Immutable."""

    __slots__ = ("_peers",)

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        """Make a group of the peers in this order; a peer that is named twice is signalled twice."""
        named = tuple(checked_iterable("peers", peers, "Peer objects"))
        for peer in named:
            if not isinstance(peer, Peer):
                raise TypeError(f"a PeerGroup holds Peer objects, got {type(peer).__name__} {peer!r}")
        self._peers = named

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    def __repr__(self) -> str:
        return f"<PeerGroup of {len(self._peers)}>"


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What became of one address of `fabric.warm(addresses)`.

    Attributes:
        address: the address.
        peer: the connected peer, or None.
        provider: what carries it, empty when it failed.
        error: why it failed, or None.
        duration: seconds from the call until the answer was seen.
    """

    address: FabricAddress
    peer: Peer | None
    provider: str
    error: Exception | None
    duration: float


def lives(rows: Iterable[Mapping[str, object]], peer_id: int) -> bool:
    """Return whether a peer is one of an engine's rows and not lost; one that was lost long ago has no row."""
    return any(row["id"] == peer_id and row["state"] not in GONE for row in rows)


def peer_statistics(row: dict[str, object]) -> PeerStatistics:
    """Return an engine's row about a peer as a value."""
    fields = dict(row)
    fields["state"] = PEER_STATES[int(str(fields["state"]))]
    return PeerStatistics(**fields)  # type: ignore[arg-type]
