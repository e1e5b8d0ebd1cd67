"""MoeGroup: who takes part in an exchange; and Meeting: how its members tell each other their keys when it opens.

Runs on the event loop's thread. The meeting over fabric messages takes all messages of the fabric while it lasts, keeps
those of other exchanges, and drops what is not for an exchange: give another Meeting where messages have other readers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import msgspec

from asyncfabric import BusyError, Fabric, FabricAddress, FabricError, Peer, PeerError
from asyncfabric._groups import beside
from asyncfabric._notice import Notice
from asyncfabric.moe.faults import missing, shortly_before_deadline
from asyncfabric.unreadable import UNREADABLE

logger: logging.Logger = logging.getLogger("asyncfabric.moe")

NEVER = 1 << 62
LAST_WORDS_S = 0.2
"""How long after the loss of a peer its card may still be read."""


class Card(msgspec.Struct, frozen=True, tag_field="moe", tag="card", forbid_unknown_fields=True, kw_only=True):
    """What a member tells each other member when an exchange opens.

    Attributes:
        tag: of the exchange.
        epoch: how often the exchange was opened before.
        rank: of the member.
        digest: of the configuration and of who is left; all must be equal.
        imm: the first immediate that the member would use; the largest of all is taken.
        keys: the right to write to the memory of each of its lanes.
    """

    tag: str
    epoch: int
    rank: int
    digest: str
    imm: int
    keys: tuple[bytes, ...]


class Meeting(Protocol):
    """Brings the cards of all members together."""

    async def meet(self, peers: Mapping[int, Peer], card: Card) -> dict[int, Card]:
        """Give our card to each of the peers and return theirs, by rank.

        Raises:
            MissingRankError: a peer is lost, or its card did not come before the caller's deadline.

        Cancellation: cards may have been given.
        """


@dataclass(frozen=True)
class MoeGroup:
    """The ranks of an exchange, as one of them sees it.

    Attributes:
        rank: of this process.
        addresses: the fabric of each rank, in the order of ranks; the own one included.
        tag: tells the exchanges of one fabric apart; the same on all ranks.
        meeting: how keys are exchanged; None: over the messages of the fabric.
    """

    rank: int
    addresses: Sequence[FabricAddress]
    tag: str = "moe"
    meeting: Meeting | None = field(default=None)

    def __post_init__(self) -> None:
        """Check that the group is one."""
        if not 0 <= self.rank < len(self.addresses):
            raise ValueError(f"rank must be in 0..{len(self.addresses) - 1}, got {self.rank}")
        if len({address.incarnation for address in self.addresses}) != len(self.addresses):
            raise ValueError("two ranks have the same address; each rank has a fabric of its own")


async def connect_ranks(fabric: Fabric, group: MoeGroup, ranks: Iterable[int]) -> dict[int, Peer]:
    """Connect to some ranks of a group, the own one left out, and return the peers by rank.

    Raises:
        MissingRankError: one of them cannot be reached.

    Cancellation: connecting goes on in the engine; only the wait for it ends.
    """
    peers = {}
    for rank in sorted(set(ranks) - {group.rank}):
        try:
            peers[rank] = await fabric.connect(group.addresses[rank])
        except FabricError as error:
            raise missing(f"opening the exchange {group.tag!r} ({error})", [rank], lost=True) from error
    await anyio.lowlevel.checkpoint()
    return peers


class FabricMeeting:
    """Meets over `fabric.send` and `fabric.messages()`; all meetings of one fabric share what was read."""

    _readers: ClassVar[WeakKeyDictionary[Fabric, _CardReader]] = WeakKeyDictionary()

    def __init__(self, fabric: Fabric) -> None:
        """Meet over an open fabric."""
        self._fabric = fabric
        self._reader = self._readers.setdefault(fabric, _CardReader())

    async def meet(self, peers: Mapping[int, Peer], card: Card) -> dict[int, Card]:
        """Give our card to each of the peers and return theirs, by rank.

        Raises:
            MissingRankError: a peer is lost, or its card did not come before the caller's deadline.

        Cancellation: cards may have been given; those that came are kept for the next meeting of the same epoch.
        """
        what = f"opening the exchange {card.tag!r}"
        payload = msgspec.msgpack.encode(card)
        for rank, peer in peers.items():
            try:
                await self._give(peer, payload)
            except FabricError as error:
                raise missing(f"{what} ({error})", [rank], lost=True) from error
        cards = self._reader.cards
        wanted = {rank: (card.tag, card.epoch, rank) for rank in peers}
        lost: list[int] = []
        with shortly_before_deadline() as scope:
            async with beside() as tasks:
                tasks.start_soon(self._watch, peers, wanted, lost, scope)
                while any(place not in cards for place in wanted.values()):
                    await self._reader.read(self._fabric)
        if absent := [rank for rank, place in wanted.items() if place not in cards]:
            raise missing(what, lost or absent, lost=bool(lost))
        return {rank: cards.pop(place) for rank, place in wanted.items()}

    async def _watch(
        self,
        peers: Mapping[int, Peer],
        wanted: Mapping[int, tuple[str, int, int]],
        lost: list[int],
        scope: anyio.CancelScope,
    ) -> None:
        """Note the peers that are lost before their card was read, and end the scope with the first of them."""
        reader = self._reader
        counter = self._fabric.counter()
        try:
            while not lost:
                absent = [rank for rank, place in wanted.items() if place not in reader.cards]
                try:
                    await counter.wait(NEVER, peers=[peers[rank] for rank in absent])
                except PeerError:
                    with anyio.move_on_after(LAST_WORDS_S):  # what came before the loss may not have been read yet
                        while any(wanted[rank] not in reader.cards for rank in absent):
                            await reader.changed.wait()
                    lost += [rank for rank in absent if wanted[rank] not in reader.cards and peers[rank].lost]
        finally:
            counter.close()
        scope.cancel()

    async def _give(self, peer: Peer, payload: bytes) -> None:
        while True:
            try:
                await self._fabric.send(peer, payload)
                return
            except BusyError:
                await self._fabric.wait_writable()


def read_card(payload: bytes) -> Card | None:
    """Return the card in a message, None for bytes that are none."""
    try:
        return msgspec.msgpack.decode(payload, type=Card)
    except UNREADABLE:
        return None


class _CardReader:
    """Cards of one fabric that nobody took yet. One meeting at a time reads, for all; whose cards are there goes."""

    def __init__(self) -> None:
        self.cards: dict[tuple[str, int, int], Card] = {}
        self.changed = Notice()
        self._is_read = False

    async def read(self, fabric: Fabric) -> None:
        """Return when there may be another card.

        Cancellation: no card is lost; another meeting reads on.
        """
        if self._is_read:
            await self.changed.wait()
            return
        self._is_read = True
        try:
            message = await fabric.messages().__anext__()
            card = read_card(message.payload)
            if card is None:
                logger.warning("%r sent what is no card of an exchange; it is dropped", message.peer)
            else:
                self.cards[card.tag, card.epoch, card.rank] = card
        finally:
            self._is_read = False
            self.changed.tell()
