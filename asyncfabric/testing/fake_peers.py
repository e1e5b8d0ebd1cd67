"""The peer table of a fake engine: who was met, in which incarnation, and whether it is still there.

Every call is made under the lock of the network. Connecting is instant and makes both sides know each other, as the
handshake of the native engine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from asyncfabric._bridge.engine import CompletionKind
from asyncfabric._bridge.secret import secret_bytes
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing.fake_keys import FakeAddress

if TYPE_CHECKING:
    from asyncfabric.testing.fake_core import EngineCore


class PeerState(IntEnum):
    """Numbers of the native PeerInfo.state."""

    CONNECTING = 0
    CONNECTED = 1
    LOST = 2
    DISCONNECTED = 3


@dataclass(slots=True, eq=False)
class FakePeer:
    """One incarnation of another engine, or of ourselves."""

    id: int
    address: FakeAddress
    state: PeerState = PeerState.CONNECTED
    bytes_sent: int = 0
    keys_before: int = 0  # how many keys were opened before its loss


class PeerTable:
    """All peers that one engine ever met."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.known: dict[int, FakePeer] = {}
        self._by_incarnation: dict[int, FakePeer] = {}

    def find(self, peer_id: int) -> FakePeer:
        """Return a peer by its id."""
        try:
            return self.known[peer_id]
        except KeyError:
            raise refusal(StatusCode.INVALID_ARGUMENT, f"peer {peer_id} never existed") from None

    def of(self, incarnation: int) -> FakePeer | None:
        """Return the peer of an incarnation, if it was met."""
        return self._by_incarnation.get(incarnation)

    def reach(
        self, address: FakeAddress, *, by_name: bool = False, opened: int = 0
    ) -> tuple[StatusCode, FakePeer | None]:
        """Connect unless connected; returns why not.

        A peer that was lost stays lost until it is connected by name or by a key that was opened (its number) after
        the loss. One that this engine disconnected is connected again by its next use.
        """
        peer = self.of(address.incarnation)
        if peer is not None and peer.state is PeerState.CONNECTED:
            return StatusCode.OK, peer
        network = self._engine.network
        target = network.find(address)
        if target is not None and secret_bytes(target.config.secret) != secret_bytes(self._engine.config.secret):
            return StatusCode.SECRET_REFUSED, peer
        again = peer is None or by_name or peer.state is PeerState.DISCONNECTED or opened > peer.keys_before
        if target is not None and again:
            target.peer_table.learn(self._engine.fake_address)
            return StatusCode.OK, self.learn(address)
        if target is None and network.occupied(address.place):
            return StatusCode.STALE_KEY, peer
        return (StatusCode.PEER_UNREACHABLE if peer is None else StatusCode.PEER_DEAD), peer

    def learn(self, address: FakeAddress) -> FakePeer:
        """Enter a living peer."""
        peer = self.of(address.incarnation)
        if peer is None:
            peer = FakePeer(len(self.known) + 1, address)
            self.known[peer.id] = self._by_incarnation[address.incarnation] = peer
        peer.state = PeerState.CONNECTED
        return peer

    def lose(self, peer: FakePeer, state: PeerState = PeerState.LOST) -> None:
        """End a connection: what is in flight to the peer is taken back, the loss reported unless it was ordered."""
        if peer.state is not PeerState.CONNECTED:
            return
        peer.state, peer.keys_before = state, self._engine.keys_opened
        if state is PeerState.LOST:
            self._engine.ring.push(CompletionKind.PEER_LOST, code=StatusCode.PEER_DEAD, value=peer.id, peer=peer.id)
        for leg in self._engine.network.flush(self._engine, peer):
            self._engine.ops.finish(leg, StatusCode.PEER_DEAD)
