"""What a session table receives (events) and what it wants done (actions), and what the layers above are handed.

Pure values. A path is one way to a peer: a number for one that we dialed, the routing id for one that was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncfabric.control.messages import Identity

Path = int | bytes
State = Literal["ready", "draining", "lost"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One parcel for a listener."""

    sender: Identity
    body: bytes
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class SessionChange:
    """What a watcher of a link receives: `peer` is now in this state, and why."""

    peer: Identity
    state: State
    reason: str


# ---- events


@dataclass(frozen=True, slots=True)
class Dial:
    """A path was opened towards an address; the key is the one its owner must have, "" without CURVE."""

    path: int
    address: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame came; the key is the authenticated one of its sender, "" without CURVE."""

    path: Path
    frame: bytes
    key: str = ""


@dataclass(frozen=True, slots=True)
class SendParcel:
    """Send a parcel; only after `admits` returned True."""

    to: Identity
    channel: str
    body: bytes
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class ParcelTaken:
    """A listener took a parcel that came over this path in this session."""

    path: Path
    session: int
    channel: str
    cost: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Begin the two-phase drain with a peer."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class PathLost:
    """A path broke, or was given up; `code` is one of REFUSALS where the peer did not take us."""

    path: Path
    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Dial | Received | SendParcel | ParcelTaken | Leave | PathLost | Tick

# ---- actions


@dataclass(frozen=True, slots=True)
class Emit:
    """Send a frame over a path."""

    path: Path
    frame: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a parcel to the listener of its channel, and feed `taken` when it took it."""

    channel: str
    arrival: Arrival
    taken: ParcelTaken


@dataclass(frozen=True, slots=True)
class Change:
    """Notify the watchers."""

    change: SessionChange


@dataclass(frozen=True, slots=True)
class Dialed:
    """A dialed path reached its peer."""

    path: int
    peer: Identity


@dataclass(frozen=True, slots=True)
class DialFailed:
    """A dialed path reached nobody, or somebody who did not take us: then `code` is a reason of `protocol_errors`."""

    path: int
    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """Close a path."""

    path: Path


@dataclass(frozen=True, slots=True)
class Room:
    """Senders to this peer may look again."""

    peer: Identity


Action = Emit | Deliver | Change | Dialed | DialFailed | Close | Room
