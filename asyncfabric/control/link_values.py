"""How a link is configured, and what it counts. Frozen values; no behaviour but checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncfabric.control.messages import MAX_FRAME_BYTES, Identity
from asyncfabric.control.session import SECOND_NS, SessionConfig


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times, bounds and places of one link.

    Attributes:
        heartbeat_s: silence after which a heartbeat is sent.
        peer_deadline_s: silence after which a peer is lost.
        connect_deadline_s: how long a handshake may take.
        drain_deadline_s: how long a two-phase drain may take.
        close_deadline_s: how long closing a link waits for its drains.
        max_frame_bytes: largest frame that is read; bodies are 2 KiB smaller.
        window_bytes: what one peer may have under way on one channel before its sends wait.
        listener_frames: arrivals that the stream of a listener holds.
        high_water_frames: ZeroMQ's high-water mark of each connection.
        ipc_folder: folder of ipc sockets, mode 0700; "" for the default of this user.
        advertise_host: host name that others use when a link is bound to all interfaces.
    """

    heartbeat_s: float = 0.5
    peer_deadline_s: float = 5.0
    connect_deadline_s: float = 5.0
    drain_deadline_s: float = 5.0
    close_deadline_s: float = 1.0
    max_frame_bytes: int = MAX_FRAME_BYTES
    window_bytes: int = 4 * MAX_FRAME_BYTES
    listener_frames: int = 64
    high_water_frames: int = 1024
    ipc_folder: str = ""
    advertise_host: str = ""

    def __post_init__(self) -> None:
        """Check every value and name the wrong one."""
        self.session_config()
        if not 0 <= self.close_deadline_s <= 3600:
            raise ValueError(f"close_deadline_s must be in 0..3600, got {self.close_deadline_s!r}")
        for name in ("listener_frames", "high_water_frames"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ValueError(f"{name} must be in 1..1048576, got {getattr(self, name)!r}")

    def session_config(self) -> SessionConfig:
        """Return the part that sessions need."""
        return SessionConfig(
            heartbeat_ns=int(self.heartbeat_s * SECOND_NS),
            peer_deadline_ns=int(self.peer_deadline_s * SECOND_NS),
            connect_deadline_ns=int(self.connect_deadline_s * SECOND_NS),
            drain_deadline_ns=int(self.drain_deadline_s * SECOND_NS),
            max_frame_bytes=self.max_frame_bytes,
            window_bytes=self.window_bytes,
        )


@dataclass(frozen=True, slots=True)
class LinkPeer:
    """A peer of a link, now.

    Attributes:
        identity: who it is.
        role: what it is in the cluster, as it stated; empty for one that is no node.
        state: ready, or draining: it leaves, or we do.
        address: where its link is reached, as it stated.
        sessions: paths to it; two when both dialed at the same moment.
        silent_s: seconds since it was last received.
    """

    identity: Identity
    role: str
    state: str
    address: str
    sessions: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """What a link did so far.

    Attributes:
        frames_sent: frames handed to sockets, control frames included; likewise the next three.
        frames_received: frames that came, whatever they were.
        bytes_sent: their bytes.
        bytes_received: their bytes.
        peers_ready: peers with a ready session now.
        peers_draining: peers that are leaving now.
        peers_lost: sessions that ended, for whatever reason.
        waiting_arrivals: arrivals that no listener took yet.
        abandoned_arrivals: arrivals dropped with their lost sender, since nobody listened on their channel.
        protocol_errors: count by reason; the reasons are those of `protocol_errors.REASONS`.
    """

    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    peers_ready: int
    peers_draining: int
    peers_lost: int
    waiting_arrivals: int
    abandoned_arrivals: int
    protocol_errors: Mapping[str, int]
