"""The peers that one fabric has names for, and the rule that `config.require` makes about who may carry them.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.peer import DISCONNECTED, GONE, Peer
from asyncfabric.errors import PeerError

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher
    from asyncfabric.config import FabricConfig


class PeersKnown:
    """One Peer object per engine id, and the providers that are allowed to carry peers."""

    def __init__(self, dispatcher: CompletionDispatcher, config: FabricConfig) -> None:
        self._dispatcher = dispatcher
        self._known: dict[int, Peer] = {}
        self._lost: WeakValueDictionary[int, Peer] = WeakValueDictionary()  # as long as somebody holds them
        # Who connects may find the peer lost before its task gets its turn: for that, the latest are enough.
        self._lost_unnamed: deque[int] = deque(maxlen=1024)
        self._require = frozenset(config.require)
        dispatcher.peer_name = self.name
        dispatcher.peer_lost = self.lose
        rails = dispatcher.engine.rails()
        self.mixed: bool = bool(self._require) and any(not self._allows(str(rail["provider"])) for rail in rails)

    def by_id(self, peer_id: int, address: FabricAddress | None = None) -> Peer:
        """Return the Peer of an engine id."""
        peer = self._known.get(peer_id) or self._lost.get(peer_id)
        if peer is None:
            gone = peer_id in self._lost_unnamed
            if address is not None:
                incarnation = address.incarnation
            else:
                row = self.row(peer_id)
                incarnation = int(row["incarnation"]) if row else 0
                gone = gone or row is None or row["state"] in GONE
            peer = Peer(self._dispatcher, peer_id, incarnation, address)
            peer._gone = gone
            kept = self._lost if gone else self._known
            peer = kept.setdefault(peer_id, peer)  # another thread may have been quicker
        elif peer._address is None:
            peer._address = address
        return peer

    def lose(self, peer_id: int) -> None:
        """Note that a peer is lost: its name is kept by those who hold it, and by nobody else."""
        peer = self._known.pop(peer_id, None) or self._lost.get(peer_id)
        if peer is None:
            self._lost_unnamed.append(peer_id)
            return
        peer._gone = True
        self._lost[peer_id] = peer

    def name(self, peer_id: int) -> str:
        """Return a peer in words, empty for 0."""
        return repr(self.by_id(peer_id)) if peer_id else ""

    def row(self, peer_id: int) -> dict[str, int | str] | None:
        """Return what the engine knows about a peer."""
        if self._dispatcher.closed:
            return None
        for row in self._dispatcher.engine.peers():
            if row["id"] == peer_id:
                return row
        return None

    def providers(self) -> dict[int, str]:
        """Return what carries each peer, by engine id."""
        if self._dispatcher.closed:
            return {}
        return {int(row["id"]): str(row["provider"]) for row in self._dispatcher.engine.peers()}

    def check_provider(self, peer: Peer) -> None:
        """Raise PeerError when `config.require` forbids what carries the peer: never a silent fallback."""
        if not self._require:
            return
        provider = self.providers().get(peer.id, "")
        if not self._allows(provider):
            raise PeerError(
                f"{peer!r} is carried by {provider!r}, but config.require permits only {sorted(self._require)}",
                remedy="compare fabric.rails on both sides: they have no required provider in common",
            )

    def check_named(self, peer: Peer, what: str) -> None:
        """The same for a peer that is named, since one that was disconnected is connected again by its next use."""
        row = self.row(peer.id)
        if row is not None and row["state"] == DISCONNECTED:
            self.check_connected(0, what)

    def check_connected(self, peer_id: int, what: str) -> None:
        """With rails that config.require forbids, refuse to connect implicitly, since that could pick one of them."""
        if peer_id == 0:
            raise PeerError(
                f"{what} would connect to a peer implicitly, while config.require forbids some of the opened rails",
                remedy="await fabric.connect(address) first; it checks what carries the peer",
            )

    def _allows(self, provider: str) -> bool:
        return all(part in self._require for part in provider.split(",")) if provider else False
