"""WeightPost: the messages of one update between ranks that send weights and ranks that receive them.

Any thread, one that receives at a time. A message of a fabric carries 8 KiB and may overtake others, so longer ones go
in parts, and each names what it is about. Messages of another update are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from asyncfabric._api.peer import Peer
from asyncfabric.blocking import Fabric, Transfer, wait_all
from asyncfabric.errors import BrokenError, BusyError, FabricError, PeerError
from asyncfabric.integrations.parts import UnfinishedMessages
from asyncfabric.integrations.weight_stream.packing import TensorPart
from asyncfabric.unreadable import UNREADABLE

PART_BYTES = 8000
LOOK_S = 0.2
"""Between two looks at whether a rank is lost, or this one gave up."""
MOST_UNFINISHED = 4096
MOST_UNFINISHED_BYTES = 256 << 20


class BucketReady(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A bucket can be read: `length` bytes from `offset` behind the key."""

    bucket: int
    key: bytes
    offset: int
    length: int
    parts: list[TensorPart]


class StreamEnded(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The sender has seen the whole stream: how many buckets it makes, and `Packing.digest`."""

    buckets: int
    digest: bytes


class BucketTaken(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The receiver has read a bucket; -1: it has all of them."""

    bucket: int


class StreamFailed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The update is given up."""

    reason: str


PostMessage = BucketReady | StreamEnded | BucketTaken | StreamFailed


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    session: int
    sender: str
    number: int
    part: int
    parts: int
    payload: bytes


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_message = msgspec.msgpack.Decoder(PostMessage).decode
_encode = msgspec.msgpack.Encoder().encode


class WeightPost:
    """What one rank sends to the ranks of the other side, and receives from them."""

    def __init__(self, fabric: Fabric, session: int, name: str, others: Mapping[str, bytes]) -> None:
        """Connect to the other side.

        Args:
            fabric: of this rank.
            session: of the update; others are dropped.
            name: of this rank.
            others: addresses of the other side's fabrics, by name.

        Raises:
            PeerError: one cannot be reached.
        """
        self._fabric = fabric
        self._session = session
        self._name = name
        self._peers = {other: fabric.connect(address) for other, address in others.items()}
        self._ids = {other: number for number, other in enumerate(others)}
        self._stream = fabric.messages()
        self._unfinished = UnfinishedMessages(MOST_UNFINISHED, MOST_UNFINISHED_BYTES)
        self._waiting: deque[tuple[str, PostMessage]] = deque()
        self._sent = 0
        self._stopped = False

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the other side."""
        return tuple(self._peers)

    def send(self, to: Iterable[str], message: PostMessage) -> None:
        """Send a message; returns when it has left.

        Raises:
            PeerError: a recipient is lost.
        """
        data = _encode(message)
        pieces = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
        self._sent += 1
        envelopes = [
            _encode(_Envelope(self._session, self._name, self._sent, part, len(pieces), piece))
            for part, piece in enumerate(pieces)
        ]
        for other in to:
            try:
                wait_all([self._submit(self._peers[other], envelope) for envelope in envelopes])
            except PeerError as error:
                raise _lost([other]) from error

    def fail(self, reason: str) -> None:
        """Report to all of the other side that the update is given up; those that are lost do not matter."""
        for other in self._peers:
            try:
                self.send([other], StreamFailed(reason))
            except FabricError:
                continue

    def take_nowait(self) -> tuple[str, PostMessage] | None:
        """Return a message that is here, and its sender; None when there is none.

        Raises:
            BrokenError: the sender gave the update up.
        """
        if not self._waiting:
            for message in self._stream.take_nowait():
                self._take(message.payload)
        return self._first()

    def receive(self, watched: Iterable[str]) -> tuple[str, PostMessage]:
        """Block until there is a message; return it and its sender.

        Args:
            watched: who may not be lost meanwhile.

        Raises:
            PeerError: one of them is.
            BrokenError: a sender gave the update up, or this rank was stopped.
            ClosedError: the fabric is closed.
        """
        names = tuple(watched)
        while True:
            found = self.take_nowait()
            if found is not None:
                return found
            if self._stopped:
                raise BrokenError(f"{self._name} gave the update up")
            try:
                self._take(self._stream.receive(LOOK_S).payload)
            except TimeoutError:
                lost = [name for name in names if self._peers[name].lost]
                if lost:
                    raise _lost(lost) from None

    def stop(self) -> None:
        """Have `receive`, in another thread, raise BrokenError soon."""
        self._stopped = True

    def _submit(self, peer: Peer, envelope: bytes) -> Transfer:
        while True:
            try:
                return self._fabric.send(peer, envelope)
            except BusyError:
                self._fabric.wait_writable()

    def _take(self, payload: bytes) -> None:
        try:
            envelope = _decode_envelope(payload)
            sender = self._ids.get(envelope.sender)
            if envelope.session != self._session or sender is None:
                return
            part, parts = envelope.part, envelope.parts
            data = self._unfinished.join(sender, envelope.number, part, parts, envelope.payload)
            if data is not None:
                self._waiting.append((envelope.sender, _decode_message(data)))
        except UNREADABLE:
            return  # of nobody who takes part

    def _first(self) -> tuple[str, PostMessage] | None:
        if not self._waiting:
            return None
        sender, message = self._waiting.popleft()
        if isinstance(message, StreamFailed):
            raise BrokenError(f"{sender} gave the update up: {message.reason}")
        return sender, message


def _lost(names: Sequence[str]) -> PeerError:
    return PeerError(
        f"{', '.join(names)} ended before the weights were there",
        remedy="look at its log; the next update begins anew",
    )
