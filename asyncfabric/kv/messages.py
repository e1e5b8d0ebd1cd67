"""The messages of the two ends of a stream, as msgspec structs; bytes come from other processes and are checked.

Pure values. Whoever carries them (fabric messages, actors, sockets) carries them whole, in any order, perhaps twice.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.kv.layout import KvLayout
from asyncfabric.unreadable import UNREADABLE

VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_TEXT = 2000


class _Base(msgspec.Struct, frozen=True, tag_field="kv", forbid_unknown_fields=True, kw_only=True):
    """`target` is the incarnation of the leaseholder's fabric, `lease` the number that it gave the lease."""

    target: int
    lease: int


class KvOffer(_Base, frozen=True, kw_only=True, tag="offer"):
    """The leaseholder offers pages to one source rank: the right to write there, and where.

    Attributes:
        version: of these messages.
        reply_to: address of the leaseholder's fabric, as bytes.
        layout: layout of the leaseholder's rank.
        digest: `layout.digest()`, what both sides compare.
        tokens: tokens that the source is to deliver.
        rotation: see relayout.
        pages: the leaseholder's block table, packed as little-endian uint32.
        pool_pages: pages of one layer in the leaseholder's pool.
        pages_key, context_key: rights to write, as bytes; the context key is empty where there is no context.
        layer_imms: one immediate for all layers, or one for each.
        context_imm: immediate of the context.
        remaining_ns: time left until the leaseholder gives up, when the offer was made.
        trace: W3C trace context, or empty; see asyncfabric.observe.spans.TraceContext.
        body: about the work, for the nodes, for example the prompt; not looked at here.
    """

    version: int = VERSION
    reply_to: bytes
    layout: KvLayout
    digest: str
    tokens: int
    rotation: int
    pages: bytes
    pool_pages: int
    pages_key: bytes
    context_key: bytes
    layer_imms: tuple[int, ...]
    context_imm: int
    remaining_ns: int
    trace: str = ""
    body: bytes = b""

    def __post_init__(self) -> None:
        """Check what would harm the source if it were wrong; decoding does this too."""
        if self.version != VERSION:
            raise ValueError(f"version must be {VERSION}, got {self.version}")
        if not 0 <= self.tokens <= 1 << 32 or self.rotation < 0:
            raise ValueError(f"tokens and rotation must be 0 or more, got {self.tokens} and {self.rotation}")
        if len(self.layer_imms) not in (1, self.layout.layers):
            raise ValueError(f"layer_imms must be 1 or {self.layout.layers}, got {len(self.layer_imms)}")
        if not 1 <= self.pool_pages <= 1 << 32:
            raise ValueError(f"pool_pages must be in 1..2**32, got {self.pool_pages}")
        if len(self.pages) != 4 * self.layout.pages_for(self.tokens):
            need = self.layout.pages_for(self.tokens)
            raise ValueError(f"{self.tokens} tokens need {need} pages, the offer has {len(self.pages) / 4:g}")
        table = self.block_table()
        if len(table) and int(table.max()) >= self.pool_pages:
            raise ValueError(f"page {int(table.max())} is beyond the pool of {self.pool_pages} pages")

    def block_table(self) -> NDArray[np.int64]:
        """Return the pages as numbers."""
        return np.frombuffer(self.pages, dtype="<u4").astype(np.int64)

    def imm_of(self, layer: int) -> int:
        """Return the immediate that counts the arrivals of a layer."""
        return self.layer_imms[layer if len(self.layer_imms) > 1 else 0]


class KvAccepted(_Base, frozen=True, kw_only=True, tag="accepted"):
    """The source has begun."""


class KvRefused(_Base, frozen=True, kw_only=True, tag="refused"):
    """The source will not write a byte, for this reason."""

    reason: str


class KvCancel(_Base, frozen=True, kw_only=True, tag="cancel"):
    """The leaseholder wants no more: stop, drain, confirm."""


class KvStopped(_Base, frozen=True, kw_only=True, tag="stopped"):
    """The source has ended: nothing of it can reach the pages any more.

    Attributes:
        clean: whether that is certain; when it is not, the leaseholder must fence.
        reason: empty when it was asked to stop, else why it stopped.
    """

    clean: bool
    reason: str = ""


KvMessage = KvOffer | KvAccepted | KvRefused | KvCancel | KvStopped

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[KvMessage] = msgspec.msgpack.Decoder(KvMessage)


def pack_pages(pages: NDArray[np.int64]) -> bytes:
    """Return page numbers as an offer carries them."""
    return pages.astype("<u4").tobytes()


def encode_message(message: KvMessage) -> bytes:
    """Return the bytes of a message."""
    return _ENCODER.encode(message)


def decode_message(data: bytes) -> KvMessage:
    """Return the message of bytes from outside; raises RemoteProtocolError for anything else."""
    if len(data) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        return _DECODER.decode(data)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"{len(data)} bytes are no message of a KvCache stream: {error}") from None
