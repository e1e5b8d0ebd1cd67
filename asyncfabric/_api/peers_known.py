"""The peers that one fabric has names for, and the rule that `config.require` makes about who may carry them.

Runs on the event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.peer import Peer
from asyncfabric.errors import PeerError

if TYPE_CHECKING:
    from asyncfabric._bridge.stairwell import Stairwell
    from asyncfabric.config import FabricConfig


class PeersKnown:
    """One Peer object per engine id, and the providers that are allowed to carry peers."""

    def __init__(self, stairwell: Stairwell, config: FabricConfig) -> None:
        self._stairwell = stairwell
        self._known: dict[int, Peer] = {}
        self._require = frozenset(config.require)
        stairwell.peer_name = self.name
        rails = stairwell.engine.rails()
        self.mixed: bool = bool(self._require) and any(not self._allows(str(rail["provider"])) for rail in rails)

    def by_id(self, peer_id: int, address: FabricAddress | None = None) -> Peer:
        """Return the Peer of an engine id."""
        peer = self._known.get(peer_id)
        if peer is None or (peer.address is None and address is not None):
            if address is not None:
                incarnation = address.incarnation
            else:
                row = self.row(peer_id)
                incarnation = int(row["incarnation"]) if row else 0
            peer = self._known[peer_id] = Peer(self._stairwell, peer_id, incarnation, address)
        return peer

    def name(self, peer_id: int) -> str:
        """Return a peer in words, empty for 0."""
        return repr(self.by_id(peer_id)) if peer_id else ""

    def row(self, peer_id: int) -> dict[str, int | str] | None:
        """Return what the engine knows about a peer."""
        if self._stairwell.closed:
            return None
        for row in self._stairwell.engine.peers():
            if row["id"] == peer_id:
                return row
        return None

    def providers(self) -> dict[int, str]:
        """Return what carries each peer, by engine id."""
        if self._stairwell.closed:
            return {}
        return {int(row["id"]): str(row["provider"]) for row in self._stairwell.engine.peers()}

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

    def check_connected(self, peer_id: int, what: str) -> None:
        """With rails that config.require forbids, refuse to connect implicitly, since that could pick one of them."""
        if peer_id == 0:
            raise PeerError(
                f"{what} would connect to a peer implicitly, while config.require forbids some of the opened rails",
                remedy="await fabric.connect(address) first; it checks what carries the peer",
            )

    def _allows(self, provider: str) -> bool:
        return all(part in self._require for part in provider.split(",")) if provider else False
