"""gather_cards: the ranks of an exchange give each other their cards, over a channel of CARD_CODEC.

Runs on the event loop's thread. Exchanges of one channel share what was received. Without a channel of the user's the
messages of the fabric carry the cards, all of which are taken while an exchange opens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import anyio

from asyncfabric import Fabric, FabricAddress, Peer, PeerError
from asyncfabric._groups import beside
from asyncfabric._notice import Notice
from asyncfabric.control import FabricChannels, PeerFound, PeerLost
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.moe.cards import CARD_CODEC, Card, CardChannel
from asyncfabric.moe.faults import missing, shortly_before_deadline
from asyncfabric.moe.group import MoeGroup

logger: logging.Logger = logging.getLogger("asyncfabric.moe")

NEVER = 1 << 62
LAST_CARDS_S = 0.2
"""How long after the loss of a peer its card may still be received."""

_channels: dict[Fabric, CardChannel] = {}
_received: WeakKeyDictionary[CardChannel, _CardReader] = WeakKeyDictionary()


async def gather_cards(fabric: Fabric, group: MoeGroup, peers: Mapping[int, Peer], card: Card) -> dict[int, Card]:
    """Give our card to the peers and return theirs, by rank.

    Raises:
        MissingRankError: a peer is lost, or its card did not come before the caller's deadline.
        RemoteProtocolError: a peer takes itself for another rank.

    Cancellation: cards may have been given; those that came are kept for the next gathering of the same epoch.
    """
    channel = group.channel or _fabric_channel(fabric)
    gathering = _Gathering(channel, group, peers, card)
    what = f"opening the exchange {card.tag!r}"
    lost: list[int] = []
    with shortly_before_deadline() as scope:
        async with beside() as tasks:
            tasks.start_soon(gathering.watch, fabric, lost, scope)
            tasks.start_soon(gathering.read)
            for rank in peers:
                tasks.start_soon(gathering.give, rank)
            await gathering.wait()
    if pending := gathering.pending():
        raise missing(what, lost or pending, lost=bool(lost))
    cards = gathering.take()
    if odd := [rank for rank, other in cards.items() if other.rank != rank]:
        raise RemoteProtocolError(
            f"ranks {odd} opened the exchange {card.tag!r} as other ranks, {[cards[rank].rank for rank in odd]}",
            remedy="give the addresses of the group in the same order on all ranks",
        )
    return cards


def _fabric_channel(fabric: Fabric) -> CardChannel:
    """Return the one channel over the messages of a fabric; it lives as long as the fabric is open."""
    for closed in [each for each in _channels if each.closed]:
        del _channels[closed]
    if fabric not in _channels:
        channels = FabricChannels(fabric, CARD_CODEC, FabricAddress.parse)
        _channels[fabric] = channels.open(str(fabric.address))
    return _channels[fabric]


class _CardReader:
    """What a channel brought that nobody took yet. One gathering at a time reads, for all.

    Attributes:
        cards: by tag and epoch of the exchange, and incarnation of the sender's fabric.
        found: how often there was a new session with a member.
    """

    def __init__(self) -> None:
        self.cards: dict[tuple[str, int, int], Card] = {}
        self.found: Counter[str] = Counter()
        self.changed = Notice()
        self._is_read = False

    async def read(self, channel: CardChannel) -> None:
        """Return when there may be something new.

        Cancellation: nothing is lost; another gathering reads on.
        """
        if self._is_read:
            await self.changed.wait()
            return
        self._is_read = True
        try:
            name, event = await channel.receive()
            if isinstance(event, PeerFound):
                self.found[name] += 1
            elif not isinstance(event, PeerLost):
                self._add(name, event)
        finally:
            self._is_read = False
            self.changed.notify()

    def _add(self, name: str, card: Card) -> None:
        try:
            self.cards[card.tag, card.epoch, FabricAddress.parse(name).incarnation] = card
        except ValueError as error:
            logger.warning("%r, which sent a card, is not called by its address: %s", name, error)


class _Gathering:
    """One rank's cards of one epoch of an exchange: those that it gives and those that it wants."""

    def __init__(self, channel: CardChannel, group: MoeGroup, peers: Mapping[int, Peer], card: Card) -> None:
        self._channel = channel
        self._group = group
        self._peers = peers
        self._card = card
        self._reader = _received.setdefault(channel, _CardReader())
        self._ungiven = set(peers)

    def pending(self) -> list[int]:
        """Return the ranks whose card is not here, or that were not given ours."""
        cards = self._reader.cards
        return [rank for rank in self._peers if rank in self._ungiven or self._place(rank) not in cards]

    def take(self) -> dict[int, Card]:
        """Return the cards, all of which are here."""
        return {rank: self._reader.cards.pop(self._place(rank)) for rank in self._peers}

    async def wait(self) -> None:
        """Return when each rank was given our card, and all cards are here.

        Cancellation: only this wait ends.
        """
        while self.pending():
            await self._reader.changed.wait()

    async def read(self) -> None:
        """Receive for ever.

        Cancellation: nothing is lost.
        """
        while True:
            await self._reader.read(self._channel)

    async def give(self, rank: int) -> None:
        """Give a rank our card, once there is a session with it.

        Cancellation: it may have been given.
        """
        name, reader = str(self._group.addresses[rank]), self._reader
        while True:
            found = reader.found[name]
            try:
                await self._channel.send(name, self._card)
                break
            except PeerError as error:
                logger.info("rank %d of %r has no card yet: %s", rank, self._card.tag, error)
            while reader.found[name] == found:
                await reader.changed.wait()
        self._ungiven.discard(rank)
        reader.changed.notify()

    async def watch(self, fabric: Fabric, lost: list[int], scope: anyio.CancelScope) -> None:
        """Note the peers that are lost before cards were exchanged with them, and end the scope with the first of them.

        Cancellation: nothing more is noted.
        """
        counter = fabric.counter()
        try:
            while not lost:
                pending = self.pending()
                try:
                    await counter.wait(NEVER, peers=[self._peers[rank] for rank in pending])
                except PeerError:
                    with anyio.move_on_after(LAST_CARDS_S):  # what came before the loss may not have been read yet
                        while set(pending) & set(self.pending()):
                            await self._reader.changed.wait()
                    lost += [rank for rank in self.pending() if rank in pending and self._peers[rank].lost]
        finally:
            counter.close()
        scope.cancel()

    def _place(self, rank: int) -> tuple[str, int, int]:
        return self._card.tag, self._card.epoch, self._group.addresses[rank].incarnation
