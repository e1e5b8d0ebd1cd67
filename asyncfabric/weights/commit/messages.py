"""What the coordinator of an update, its receivers and its senders say to each other. Values only.

Each message names its version. Links keep the order of one session, and a session begins with `Standing`: nothing that
was said before it is heard after it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Version = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Reason = Annotated[str, Meta(max_length=2000)]
Digest = Annotated[str, Meta(max_length=128)]


class Prepare(Struct, frozen=True, tag="weights.prepare"):
    """To receivers: make room for a version whose manifest has this digest; answered by Ready or Failed."""

    version: Version
    manifest: Digest


class Stopped(Struct, frozen=True, tag="weights.stopped"):
    """From a receiver without room for two versions: for the sake of this one, the version that it held is gone.

    It serves nothing until this one or another is complete. Said before Ready, and also when the update has ended.
    """

    version: Version


class Ready(Struct, frozen=True, tag="weights.ready"):
    """From a receiver: its memory is open for this version, with keys that no earlier version had."""

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
    """From a receiver: it holds the version now; or could not get it, and `reason` says why."""

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
FromReceiver = Standing | Stopped | Ready | Verified | Failed | Fetched
ToSender = Write | Abort
