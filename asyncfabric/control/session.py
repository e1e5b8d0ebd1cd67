"""One session: a path, its sequence numbers, its windows and its times; and the peer that one or two of them make.

Pure. Two processes that dial each other at the same moment get two paths; both belong to the one peer and share its
fate, so that a parcel that was accepted is never lost silently. What frames do is in `session_table`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncfabric.control.events import Path
from asyncfabric.control.messages import ENVELOPE_BYTES, MAX_FRAME_BYTES, Identity
from asyncfabric.control.window import ReceiveWindow, SendWindow, largest_body

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Times and bounds of sessions.

    Attributes:
        heartbeat_ns: a session that sent nothing for so long sends a heartbeat.
        peer_deadline_ns: a peer that was not received for so long is lost.
        connect_deadline_ns: a handshake that takes longer has failed.
        drain_deadline_ns: a two-phase drain that takes longer ends in lost.
        max_frame_bytes: largest frame that is read.
        window_bytes: what one peer may have under way on one channel (see `window`).
    """

    heartbeat_ns: int = SECOND_NS // 2
    peer_deadline_ns: int = 5 * SECOND_NS
    connect_deadline_ns: int = 5 * SECOND_NS
    drain_deadline_ns: int = 5 * SECOND_NS
    max_frame_bytes: int = MAX_FRAME_BYTES
    window_bytes: int = 4 * MAX_FRAME_BYTES

    def __post_init__(self) -> None:
        """Check the bounds and name the wrong one."""
        for name in ("heartbeat_ns", "peer_deadline_ns", "connect_deadline_ns", "drain_deadline_ns"):
            if not 0 < getattr(self, name) <= 3600 * SECOND_NS:
                raise ValueError(f"{name} must be in (0, 3600 s], got {getattr(self, name)} ns")
        if self.peer_deadline_ns < 2 * self.heartbeat_ns:
            raise ValueError(
                f"peer_deadline_ns must be at least two heartbeats ({2 * self.heartbeat_ns}), "
                f"got {self.peer_deadline_ns}: one late heartbeat would lose a peer"
            )
        if not 2 * ENVELOPE_BYTES <= self.max_frame_bytes <= 1 << 28:
            raise ValueError(f"max_frame_bytes must be in {2 * ENVELOPE_BYTES}..2**28, got {self.max_frame_bytes}")
        if largest_body(self.window_bytes) < self.max_frame_bytes:
            raise ValueError(
                f"window_bytes must be at least 2 * max_frame_bytes = {2 * self.max_frame_bytes}, got "
                f"{self.window_bytes}: the largest frame would never get credit"
            )


@dataclass(slots=True)
class Session:
    """What is known of one path."""

    path: Path
    nonce: int
    dialed: bool
    address: str
    key: str
    state: Literal["dialing", "ready"]
    receives: ReceiveWindow
    sends: SendWindow
    received_ns: int
    sent_ns: int
    deadline_ns: int  # of the handshake
    identity: Identity | None = None
    role: str = ""
    capabilities: tuple[str, ...] = ()
    largest_body: int = 0
    next_in: int = 1
    next_out: int = 1
    unanswered: int = 0  # Hellos that no Welcome came for yet


@dataclass(slots=True)
class SessionPeer:
    """One identity and the sessions to it; parcels leave over the first, arrive over all."""

    identity: Identity
    role: str
    key: str
    sessions: list[Session] = field(default_factory=list)
    state: Literal["ready", "draining"] = "ready"
    leaving: bool = False  # we began the drain
    drain_deadline_ns: int = 0

    @property
    def way_out(self) -> Session:
        """The session over which parcels leave."""
        return self.sessions[0]
