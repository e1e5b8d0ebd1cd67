"""StoreCalls: what a StoreChannels reads and writes in its store; called in threads, one call at a time.

    PREFIX/members           how many members were ever opened        PREFIX/member/I     name of member I
    PREFIX/bell/I            added to after each message to it        PREFIX/beat/I       added to while it lives
    PREFIX/left/I            it closed                                PREFIX/taken/I/J     messages of I that J received
    PREFIX/sent/I/J          pieces that I had sent to J when it closed
    PREFIX/message/I/J/N     piece N of I to J here, deleted by J     PREFIX/address/I     of its process's fabric

A member polls one counter, its bell, which whoever sends to it adds to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Protocol

from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.control.channels.pieces import LAST, MessagePiece, PieceStream, decode_piece, encode_piece

BEATS = 5
"""Signs of life in a deadline."""


class KeyStore(Protocol):
    """What is used of a store; torch.distributed's TCPStore, FileStore, HashStore and PrefixStore have it."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins with 0; return what it is now."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""

    def delete_key(self, key: str) -> bool:
        """Forget a key."""


def connected_apart(store: KeyStore) -> KeyStore:
    """Return the same store over another connection, where its kind can have one (torch from 2.8 on).

    A TCPStore answers one call of a connection at a time. Over the program's own everybody would wait while the program
    waits there for a key, or torch does for the ranks of a new group. It blocks until the store answers, for as long as
    the store's own timeout.
    """
    clone = getattr(type(store), "clone", None)
    return clone(store) if clone is not None else store


@dataclass(slots=True)
class StoreMember:
    """A member of any process, as seen here; `silent`: looks at its beat that found no new one."""

    number: int
    name: str
    address: str = ""
    beat: int = -1
    silent: int = 0


@dataclass(slots=True)
class StoreBox:
    """What a member of this process keeps: the bell, and by the number of a peer what goes there and comes from there.

    Attributes:
        sent, received: the streams; `taken` of those that are received is not used.
        stored, fetched: pieces that went through the store.
        whole: messages that were put into the channel.
        acknowledged: of them, those that were received, as the store has it.
    """

    channel: MemberChannel[Any]
    number: int
    bell: int = -1
    sent: dict[int, PieceStream] = field(default_factory=dict)
    received: dict[int, PieceStream] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    fetched: dict[int, int] = field(default_factory=dict)
    whole: dict[int, int] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)


class MemberFound(NamedTuple):
    """A member is there."""

    peer: StoreMember


class MemberLost(NamedTuple):
    """A member is gone.

    Attributes:
        sent: of one that closed, how many pieces it had sent to each member here, by number.
    """

    peer: StoreMember
    reason: str
    sent: dict[int, int]


class PieceFetched(NamedTuple):
    """A piece was in the store."""

    box: StoreBox
    peer: StoreMember
    piece: MessagePiece


Change = MemberFound | MemberLost | PieceFetched


class StoreCalls:
    """The calls of one process; each may raise what the store raises."""

    def __init__(self, store: KeyStore, prefix: str, window: int, deadline_s: float) -> None:
        """Use a store."""
        self._store = store
        self._prefix = prefix
        self._window = window
        self._deadline_s = deadline_s
        self._seen = 0
        self._unnamed_s = 0.0
        self._beat_s = -deadline_s

    def join(self, name: str, address: str) -> int:
        """Add a member of this process; return its number."""
        number = self._store.add(self._key("members"), 1) - 1
        if address:
            self._store.set(self._key("address", number), address)
        self._store.set(self._key("member", number), name)
        return number

    def leave(self, box: StoreBox, peers: Iterable[int]) -> None:
        """Note that a member is gone, and how much it sent, and ring at its peers."""
        for number, stream in box.sent.items():
            self._store.set(self._key("sent", box.number, number), str(stream.number))
        self._store.set(self._key("left", box.number), "it was closed")
        for number in peers:
            self._store.add(self._key("bell", number), 1)

    def send(self, box: StoreBox, to: int, data: bytes) -> bool:
        """Store a message, or return False while the recipient's window is full."""
        stream = box.sent.setdefault(to, PieceStream())
        if stream.messages - stream.taken >= self._window:
            stream.taken = int(self._read("taken", box.number, to) or 0)
            if stream.messages - stream.taken >= self._window:
                return False
        self.put(box, MessagePiece(str(box.number), str(to), LAST, stream.number, data))
        stream.number += 1
        stream.messages += 1
        return True

    def put(self, box: StoreBox, piece: MessagePiece) -> None:
        """Store a piece."""
        to = int(piece.to)
        number = box.stored.get(to, 0)
        self._store.set(self._key("message", box.number, to, number), encode_piece(piece))
        box.stored[to] = number + 1
        self._store.add(self._key("bell", to), 1)

    def poll(self, boxes: list[StoreBox], known: list[StoreMember]) -> list[Change]:
        """Return what happened, in order."""
        changes: list[Change] = []
        peers = {peer.name: peer for peer in known}
        beats = monotonic() - self._beat_s > self._deadline_s / BEATS
        if beats:
            self._beat_s = monotonic()
            for box in boxes:
                if reason := self._read("left", box.number):
                    raise ConnectionError(f"others lost {box.channel.name}: {reason.decode()}")
                self._store.add(self._key("beat", box.number), 1)
        for peer in self._new_members():
            if (old := peers.get(peer.name)) is not None:
                changes += [*self._fetch(old, boxes), MemberLost(old, "it began anew", {})]
            peers[peer.name] = peer
            changes.append(MemberFound(peer))
        if self._was_rung(boxes, known) or beats or changes:
            for peer in peers.values():
                reason_of_end = self._end_of(peer, beats)
                changes += self._fetch(peer, boxes)  # after the question: everything that it sent is there
                if reason_of_end:
                    sent = {box.number: int(self._read("sent", peer.number, box.number) or 0) for box in boxes}
                    changes.append(MemberLost(peer, reason_of_end, sent))
        return changes

    def _new_members(self) -> Iterator[StoreMember]:
        members = self._store.add(self._key("members"), 0)
        while self._seen < members:
            name = self._read("member", self._seen)
            if name is None:  # it has its number and not yet its name; unless it died in between
                self._unnamed_s = self._unnamed_s or monotonic()
                if monotonic() - self._unnamed_s < self._deadline_s:
                    return
            self._unnamed_s = 0.0
            self._seen += 1
            if name is not None:
                address = self._read("address", self._seen - 1) or b""
                yield StoreMember(self._seen - 1, name.decode(), address.decode())

    def _was_rung(self, boxes: list[StoreBox], known: list[StoreMember]) -> bool:
        """Acknowledge what was received; return whether there may be more."""
        rung = False
        for box in boxes:
            bell = self._store.add(self._key("bell", box.number), 0)
            rung, box.bell = rung or bell != box.bell, bell
            for peer in known:
                whole = box.whole.get(peer.number, 0)
                taken = max(0, whole - box.channel.untaken(peer.name))
                if taken > box.acknowledged.get(peer.number, 0):
                    self._store.set(self._key("taken", peer.number, box.number), str(taken))
                    box.acknowledged[peer.number] = taken
                    rung = True  # what the window did not take in
        return rung

    def _fetch(self, peer: StoreMember, boxes: list[StoreBox]) -> list[Change]:
        """Take a peer's pieces out of the store, as many as its window has room for."""
        found: list[Change] = []
        if any(box.number == peer.number for box in boxes):
            return found  # it hands its messages over
        for box in boxes:
            number, room = box.fetched.get(peer.number, 0), self._window - box.channel.untaken(peer.name)
            while room > 0 and (data := self._read("message", peer.number, box.number, number)) is not None:
                self._store.delete_key(self._key("message", peer.number, box.number, number))
                found.append(PieceFetched(box, peer, decode_piece(data)))
                number, room = number + 1, room - 1
            box.fetched[peer.number] = number
        return found

    def _end_of(self, peer: StoreMember, beats: bool) -> str:
        """Return why a peer is not there any more; empty for one that is."""
        if reason := self._read("left", peer.number):
            return reason.decode()
        if not beats:
            return ""
        beat = self._store.add(self._key("beat", peer.number), 0)
        peer.silent = 0 if beat != peer.beat else peer.silent + 1
        peer.beat = beat
        if peer.silent <= BEATS:
            return ""
        silence = f"it gave no sign of life for {self._deadline_s:g} s"
        self._store.set(self._key("left", peer.number), silence)
        return silence

    def _read(self, *place: object) -> bytes | None:
        key = self._key(*place)
        return self._store.get(key) if self._store.check([key]) else None

    def _key(self, *place: object) -> str:
        return "/".join((self._prefix, *map(str, place)))
