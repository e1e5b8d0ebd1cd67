"""What the workers of two engines send each other beside pages, and what travels in a request's kv_transfer_params.

A message longer than the fabric's goes in parts, which may overtake each other.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec

from asyncfabric import Peer
from asyncfabric.blocking import Fabric
from asyncfabric.integrations.parts import UnfinishedMessages
from asyncfabric.integrations.vllm.layout import WorkerLayout
from asyncfabric.unreadable import UNREADABLE

PARAMS = "asyncfabric"
"""The key of kv_transfer_params under which the engine that prefills is described."""
PART_BYTES = 8000
MAX_PARTS = 4096
UNFINISHED, UNFINISHED_BYTES = 1024, 64 << 20
"""Bounds of the messages of which parts are missing."""


class Source(msgspec.Struct, frozen=True):
    """Where a request's blocks are pushed from, as in kv_transfer_params.

    Attributes:
        transfer: the name of the transfer, the same at both engines.
        addresses: of the fabric of each worker, in base64.
        order: Split.order of the workers.
    """

    transfer: str
    addresses: list[str]
    order: str = ""

    def address(self, rank: int) -> bytes:
        """Return the address of a worker's fabric."""
        return base64.b64decode(self.addresses[rank])


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: push blocks `first`... of a transfer into these, one arrival of `imm` for each of a layer."""

    transfer: str
    first: int
    blocks: list[int]
    imm: int
    layout: WorkerLayout


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: push no more of a transfer to a worker, and confirm when nothing of it is under way."""

    transfer: str
    rank: int
    ranks: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: nothing of a transfer is under way any more, and not all of it was pushed."""

    transfer: str
    reason: str


Message = Offer | Cancel | Ended
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def source_of(params: dict[str, Any] | None) -> Source | None:
    """Return where a request's blocks come from, None if its parameters name no engine of this connector."""
    try:
        source = msgspec.convert((params or {}).get(PARAMS), Source)
        for rank in range(len(source.addresses)):
            source.address(rank)
    except (msgspec.ValidationError, ValueError):
        return None
    return source


def transfer_asked(params: dict[str, Any]) -> str:
    """Return the name that a proxy gives to the transfer of a request that is computed here, or nothing."""
    asked = params.get(PARAMS)
    name = asked.get("transfer") if isinstance(asked, dict) else None
    return name if isinstance(name, str) else ""


class Mail:
    """Messages of a worker over its fabric. Any thread sends, one receives."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._stream = fabric.messages()
        self._numbers = count()
        self._unfinished = UnfinishedMessages(UNFINISHED, UNFINISHED_BYTES)

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message; never waits.

        Raises:
            FabricError: the peer is lost, or too much is in flight.
        """
        packed, number = msgspec.msgpack.encode(message), next(self._numbers)
        cut = [packed[begin : begin + PART_BYTES] for begin in range(0, len(packed), PART_BYTES)]
        for part, piece in enumerate(cut):
            self._fabric.send(peer, msgspec.msgpack.encode((number, part, len(cut), piece)))

    def received(self) -> Iterator[tuple[Peer, Message]]:
        """Yield each message that is whole, and wait for the next one; malformed ones are dropped.

        Raises:
            ClosedError: the fabric is closed.
        """
        for peer, payload in self._stream:
            try:
                number, part, parts, piece = msgspec.msgpack.decode(payload, type=tuple[int, int, int, bytes])
                if not 0 <= part < parts <= MAX_PARTS:
                    continue
                whole = self._unfinished.join(peer.id, number, part, parts, piece)
                if whole is None:
                    continue
                message = _DECODER.decode(whole)
            except UNREADABLE:
                continue
            yield peer, message
