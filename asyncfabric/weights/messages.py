"""Messages between the coordinator, trainers and receivers of an update. Values and their coding; imports no role.

Weights go through the fabric; here are keys, counters, checksums, maxima, with their version. Columns of numbers are
little-endian bytes. A session of a receiver begins with `Standing`; no message of an earlier one arrives after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.unreadable import UNREADABLE
from asyncfabric.weights.memory.checksums import ChecksumKind


@dataclass(frozen=True, slots=True)
class CodingReport:
    """What one trainer sent to one receiver that reads codings.

    Attributes:
        sender, receiver: names.
        coding: "full", "delta" or "exponent"; rows that it would not make shorter go as they are.
        plain_bytes: of weights and scales.
        sent_bytes: that were written instead.
        why: it was chosen.
    """

    sender: str
    receiver: str
    coding: str
    plain_bytes: int
    sent_bytes: int
    why: str

    @property
    def saved_bytes(self) -> int:
        """Bytes that did not have to be sent."""
        return self.plain_bytes - self.sent_bytes


Version = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

Reason = Annotated[str, Meta(max_length=2000)]

Digest = Annotated[str, Meta(max_length=128)]


class Prepare(Struct, frozen=True, tag="weights.prepare"):
    """To receivers: make room for a version whose manifest has this digest; answered by Ready or Failed."""

    version: Version
    manifest: Digest


class Stopped(Struct, frozen=True, tag="weights.stopped"):
    """From a receiver without room for two versions: for the sake of this one, the version that it held is gone.

    It serves nothing until this one or another is complete. Sent before Ready, and also when the update has ended.
    """

    version: Version


class Ready(Struct, frozen=True, tag="weights.ready"):
    """From a receiver: its memory is open for this version, with keys that no earlier version had."""

    version: Version


class Reached(Struct, frozen=True, tag="weights.reached"):
    """From a receiver: it is at a step boundary, for which this version, which is over, had waited."""

    version: Version


class Write(Struct, frozen=True, tag="weights.write"):
    """To senders: write to these receivers, all others are gone."""

    version: Version
    receivers: list[str]


class Verified(Struct, frozen=True, tag="weights.verified"):
    """From a receiver: every byte is here and its checksum is right. It stays in doubt until Commit or Abort."""

    version: Version


class Failed(Struct, frozen=True, tag="weights.failed"):
    """From a receiver or a sender: this version cannot be completed here."""

    version: Version
    reason: Reason


class Commit(Struct, frozen=True, tag="weights.commit"):
    """To receivers: the version is decided; it serves from the next step boundary."""

    version: Version


class Abort(Struct, frozen=True, tag="weights.abort"):
    """To receivers and senders: the version will never serve; what was written of it is dropped."""

    version: Version
    reason: Reason


class CatchUp(Struct, frozen=True, tag="weights.catch_up"):
    """To a receiver that does not hold the committed version: fetch it from this receiver; answered by Fetched."""

    version: Version
    source: str


class Fetched(Struct, frozen=True, tag="weights.fetched"):
    """From a receiver: it holds the version now; or could not get it, and `reason` is why."""

    version: Version
    reason: Reason = ""


class Difference(Struct, frozen=True, array_like=True):
    """Where a receiver's plan differs first from the coordinator's: the number of the part, and what it is there."""

    part: Annotated[int, Meta(ge=0, le=1 << 17)]
    text: Annotated[str, Meta(max_length=700)]


class Standing(Struct, frozen=True, tag="weights.standing"):
    """From a receiver, first in each session, and again after a rest while it is refused.

    Attributes:
        held: the version that is complete in its memory, 0 for none.
        verified: the version that waits there for a decision, 0 for none.
        in_place: it has room for one version only: what it holds is gone once the next one is written.
        manifest: the digest of its plan without replicas; with another one than the coordinator's it is refused.
        differs: once it was refused, where the plans differ first.
    """

    held: Version
    verified: Version
    in_place: bool = False
    manifest: Digest = ""
    differs: Difference | None = None


ToReceiver = Prepare | Commit | Abort | CatchUp
FromReceiver = Standing | Stopped | Reached | Ready | Verified | Failed | Fetched
ToSender = Write | Abort

Name = Annotated[str, Meta(max_length=256)]

Column = Annotated[bytes, Meta(max_length=1 << 20)]

Keys = list[tuple[Annotated[int, Meta(ge=0)], Annotated[bytes, Meta(max_length=8192)]]]
"""To a receiver's memory: the byte of its layout that each key begins at, ascending, and the key."""

MOST_ROWS = 32768
"""Rows in one Written: half a megabyte."""


class Seat(Struct, frozen=True, array_like=True):
    """A replica that takes part, its seat in the plan, and the replica that feeds it, empty for none."""

    name: Name
    seat: int
    parent: str


class Roster(Struct, frozen=True, tag="weights.roster"):
    """From the coordinator to everybody, before Prepare: the replicas of this version; all make one plan of it.

    `relay`: whether receivers forward this time; `plan` is the digest of the plan that all must make of it.
    """

    version: Version
    plan: str
    relay: bool
    replicas: list[Seat]


class Offered(Struct, frozen=True, tag="weights.offered"):
    """From a trainer to the coordinator: this rank holds the version and can write it."""

    version: Version


class CodedSlots(Struct, frozen=True, array_like=True):
    """Where a receiver lets one sender put coded rows, if it reads any coding.

    Attributes:
        codings: that it reads, names as in `coding.Coding`.
        base: the version that it holds whole and still holds when this one is complete; 0 for none.
        key: to slots that lie one after the other, for this sender alone.
        slot_bytes: of each.
        imms: the counter of each slot.
        senders: how many have slots here.
    """

    codings: list[str]
    base: Version
    key: Annotated[bytes, Meta(max_length=8192)]
    slot_bytes: int
    imms: Annotated[list[int], Meta(max_length=64)]
    senders: int


class Opened(Struct, frozen=True, tag="weights.opened"):
    """From a receiver to each of its senders: where the version goes, and the counter for what this sender writes.

    `checksum` is what it works out quickest; it takes every kind. `share_bytes` are worth a report to it, see `Share`;
    0, as when a participant does not know the field, for every unit.
    """

    version: Version
    keys: Keys
    imm: int
    coded_slots: CodedSlots | None = None
    checksum: ChecksumKind = "xxh3"
    share_bytes: int = 0


class Written(Struct, frozen=True, tag="weights.written"):
    """From a sender to a receiver: rows of the plan (int64) and their checksums (uint64).

    Their writes have ended; or they are among the first `after` that this sender's counter counts there.
    """

    version: Version
    rows: Column
    sums: Column
    checksum: ChecksumKind = "xxh3"
    after: Annotated[int, Meta(ge=0)] = 0


class Coded(Struct, frozen=True, tag="weights.coded"):
    """From a sender to a receiver: one write fills a slot with coded rows, which lie there one after the other.

    Attributes:
        slot: of this sender's coded_slots; it is the sender's again after Taken.
        rows, sums, checksum: as in Written; the checksums are of the decoded bytes.
        codings: uint8, for each row the place of its coding in `coding.KNOWN`.
        lengths: int64, coded bytes of each row.
    """

    version: Version
    slot: Annotated[int, Meta(ge=0, lt=64)]
    rows: Column
    sums: Column
    codings: Column
    lengths: Column
    checksum: ChecksumKind = "xxh3"


class Taken(Struct, frozen=True, tag="weights.taken"):
    """The answer to Coded: the slot was read and may be filled again."""

    version: Version
    slot: int


class Maxima(Struct, frozen=True, tag="weights.maxima"):
    """From trainer to trainer: the maxima (float32) of parts of blocks that the two share in one parameter."""

    version: Version
    parameter: int
    kind: int
    values: Column


class Wrote(Struct, frozen=True, tag="weights.wrote"):
    """From a trainer to the coordinator: all its writes have ended, and how many bytes they were.

    It stays until the outcome. From a receiver that forwards to some that read codings: what it passed on, sent before
    Verified.
    """

    version: Version
    codings: list[CodingReport] = []
    sent_bytes: Annotated[int, Meta(ge=0)] = 0


class Unreachable(Struct, frozen=True, tag="weights.unreachable"):
    """From a sender to the coordinator: writes to this receiver fail. The coordinator knows whether it is dead."""

    version: Version
    receiver: Name
    reason: Reason


class Outcome(Struct, frozen=True, tag="weights.outcome"):
    """From the coordinator to the trainers: how the update ended; an empty reason: it was decided."""

    version: Version
    reason: Reason


class Gone(Struct, frozen=True, tag="weights.gone"):
    """From the coordinator to trainers and receivers: it has lost this participant."""

    name: Name


class Refused(Struct, frozen=True, tag="weights.refused"):
    """From the coordinator to a receiver whose plan is another one: it takes part in nothing, and others go on.

    Attributes:
        manifest: the digest of the coordinator's plan without replicas.
        reason: what differs, as far as it is known.
        outline: see `agreement.Outline`, for the receiver to find what differs; empty once it reported that.
    """

    manifest: str
    reason: Reason
    outline: Column = b""


class Want(Struct, frozen=True, tag="weights.want"):
    """From a receiver that is behind to one that holds the version: write all your tensors behind these keys.

    `checksum` is what it works out quickest; it takes every kind.
    """

    version: Version
    keys: Keys
    imm: int
    checksum: ChecksumKind = "xxh3"


class Given(Struct, frozen=True, tag="weights.given"):
    """The answer to Want: chunks were written and these are their checksums (uint64); or a reason why not.

    `imm` is that of the Want: an earlier one of the same version may be answered late.
    """

    version: Version
    imm: int
    sums: Column
    reason: Reason = ""
    checksum: ChecksumKind = "xxh3"


WeightMessage = (
    Prepare
    | Stopped
    | Reached
    | Ready
    | Write
    | Verified
    | Failed
    | Commit
    | Abort
    | CatchUp
    | Fetched
    | Standing
    | Roster
    | Offered
    | Opened
    | Written
    | Maxima
    | Wrote
    | Unreachable
    | Outcome
    | Gone
    | Want
    | Given
    | Coded
    | Taken
    | Refused
)
"""Every message between the participants of an update."""

_latest: deque[tuple[WeightMessage, bytes]] = deque(maxlen=4)
_encoder: msgspec.msgpack.Encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WeightMessage] = msgspec.msgpack.Decoder(WeightMessage)


def encode_message(message: WeightMessage) -> bytes:
    """Return a message as bytes, at most about a megabyte; one that goes to many is encoded once."""
    for sent, data in _latest:
        if sent is message:
            return data
    data = _encoder.encode(message)
    _latest.append((message, data))
    return data


def decode_message(data: bytes | bytearray | memoryview) -> WeightMessage:
    """Return the message of these bytes; raises RemoteProtocolError for anything that is none."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"{len(data)} bytes are no message of a weight update: {error}") from error
