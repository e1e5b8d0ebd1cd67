"""RemoteAgent: what one agent knows of another, from its metadata.

Any thread. Metadata only grows: older metadata never replaces newer, another life of the agent replaces all.
"""

from __future__ import annotations

import logging
from threading import Lock

from asyncfabric import FabricAddress, Peer, RegionKey, blocking
from asyncfabric.errors import FabricError
from asyncfabric.integrations.nixl.errors import translated
from asyncfabric.integrations.nixl.metadata import Metadata
from asyncfabric.integrations.nixl.note_slots import NoteSlots
from asyncfabric.integrations.nixl.ranges import Place, RangeTable
from asyncfabric.integrations.nixl.sent_notes import SentNotes

logger: logging.Logger = logging.getLogger(__name__)


class RemoteAgent:
    """Another agent: its fabric and the keys of its memory; of the agent itself for transfers within it."""

    def __init__(self, fabric: blocking.Fabric, known: Metadata, address: FabricAddress) -> None:
        self.name: str = known.name
        self.address: FabricAddress = address
        self.removed: bool = False
        self.slots: NoteSlots | None = None  # asked for by the first noted WRITE over a connection
        self.notes: SentNotes = SentNotes(fabric, known.name)
        self._fabric = fabric
        self._lock = Lock()
        self.connected: Peer | None = None  # while no call has found the connection lost
        self._serial = known.serial
        self._packed = dict(known.keys)
        self._keys: dict[bytes, RegionKey] = {}
        self._table: RangeTable[RegionKey] | None = None

    def learn(self, newer: Metadata) -> None:
        """Take other metadata of the same life: whole and newer replaces, partial adds, older does nothing."""
        with self._lock:
            if newer.whole and newer.serial >= self._serial:
                packed = newer.keys
            elif newer.whole:
                return
            else:
                packed = self._packed | newer.keys if newer.serial >= self._serial else newer.keys | self._packed
            if packed != self._packed:
                self._packed = dict(packed)
                self._table = None
            self._serial = max(self._serial, newer.serial) if newer.whole else self._serial

    def table(self) -> RangeTable[RegionKey]:
        """Return the keys by address."""
        with self._lock:
            if self._table is None:
                self._keys = {raw: self._keys.get(raw) or _parsed(raw, self.name) for raw in self._packed.values()}
                self._table = RangeTable((place, self._keys[raw]) for place, raw in self._packed.items())
            return self._table

    def places(self) -> list[Place]:
        """Return the registrations that are known."""
        with self._lock:
            return list(self._packed)

    def peer(self) -> Peer:
        """Return the peer, connected on first use and again after `disconnected()`.

        Raises:
            nixlRemoteDisconnectError: it cannot be reached.
        """
        peer = self.connected
        if peer is not None:
            return peer
        try:
            peer = self._fabric.connect(self.address)
        except (FabricError, ValueError) as error:
            raise translated(error, f"connecting to agent {self.name!r}") from error
        self.connected = peer
        return peer

    def disconnected(self) -> None:
        """Note that the connection is lost: the next note connects again."""
        self.connected = None

    def forget(self) -> None:
        """Remove it: lists and transfers that were prepared for it find nothing any more."""
        self.removed = True
        peer, self.connected = self.connected, None
        if peer is not None:
            try:
                self._fabric.disconnect(peer)
            except FabricError as error:
                logger.debug("disconnecting from agent %r: %s", self.name, error)


def _parsed(raw: bytes, name: str) -> RegionKey:
    try:
        return RegionKey.from_bytes(raw)
    except ValueError as error:
        raise translated(error, f"a key in the metadata of agent {name!r}") from None
