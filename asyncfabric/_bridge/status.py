"""Status codes of the native engine, for Python: numbers, kinds and texts of native/include/asyncfabric/status.h.

Runs on any thread. The unit tests compare this table with the header, so the two cannot drift apart. Which exception
a status becomes is not decided here but in `asyncfabric._bridge.faults`.
"""

from __future__ import annotations

from enum import IntEnum

from asyncfabric._bridge.engine import EngineStatusError, StatusKind


class StatusCode(IntEnum):
    """What happened; numbers of the native enum."""

    OK = 0
    BUSY = 1
    CLOSED = 2
    CANCELLED = 3
    INVALID_ARGUMENT = 4
    OUT_OF_BOUNDS = 5
    STALE_KEY = 6
    ACCESS_DENIED = 7
    TRANSPORT = 8
    AMBIGUOUS = 9
    DRAIN_TIMEOUT = 10
    UNSUPPORTED = 11
    PEER_DEAD = 12
    PEER_UNREACHABLE = 13
    PEER_REJECTED = 14
    RAIL_DOWN = 15
    NO_MEMORY = 16
    NO_PROVIDER = 17
    TIMEOUT = 18
    INTERNAL = 19
    UNCONFIRMED = 20
    NOT_TAKEN = 21
    SECRET_REFUSED = 22

    @property
    def kind(self) -> StatusKind:
        """How much is broken."""
        return _TABLE[self][0]

    @property
    def text(self) -> str:
        """Return the sentence of the native table."""
        return _TABLE[self][1]


_TABLE: dict[StatusCode, tuple[StatusKind, str]] = {
    StatusCode.OK: (StatusKind.NONE, "ok"),
    StatusCode.BUSY: (StatusKind.BUSY, "a bounded queue is full"),
    StatusCode.CLOSED: (StatusKind.CLOSED, "the object was closed or released"),
    StatusCode.CANCELLED: (StatusKind.CANCELLED, "the operation was cancelled"),
    StatusCode.INVALID_ARGUMENT: (StatusKind.VALUE, "an argument is malformed"),
    StatusCode.OUT_OF_BOUNDS: (StatusKind.VALUE, "a range leaves its region"),
    StatusCode.STALE_KEY: (StatusKind.STALE, "the key belongs to a revoked generation or an earlier incarnation"),
    StatusCode.ACCESS_DENIED: (StatusKind.TRANSFER, "the target refused the access"),
    StatusCode.TRANSPORT: (StatusKind.TRANSFER, "the transport reported an error"),
    StatusCode.AMBIGUOUS: (StatusKind.TRANSFER, "the transfer may or may not have been counted"),
    StatusCode.DRAIN_TIMEOUT: (
        StatusKind.TRANSFER,
        "the transfer did not drain before its deadline; the region is quarantined",
    ),
    StatusCode.UNSUPPORTED: (StatusKind.TRANSFER, "no rail to this peer can do this"),
    StatusCode.PEER_DEAD: (StatusKind.PEER, "the peer process died or stopped answering"),
    StatusCode.PEER_UNREACHABLE: (StatusKind.PEER, "the peer could not be reached before the deadline"),
    StatusCode.PEER_REJECTED: (StatusKind.PEER, "the peer refused the connection"),
    StatusCode.RAIL_DOWN: (StatusKind.DEVICE, "the rail went down"),
    StatusCode.NO_MEMORY: (StatusKind.DEVICE, "memory could not be allocated or registered"),
    StatusCode.NO_PROVIDER: (StatusKind.DEVICE, "the provider or its library is not available"),
    StatusCode.TIMEOUT: (StatusKind.TRANSFER, "the deadline passed"),
    StatusCode.INTERNAL: (StatusKind.INTERNAL, "an internal invariant broke"),
    StatusCode.UNCONFIRMED: (StatusKind.BUSY, "a peer has not confirmed yet that the counter of before is closed"),
    StatusCode.NOT_TAKEN: (StatusKind.TRANSFER, "the peer takes no more messages"),
    StatusCode.SECRET_REFUSED: (StatusKind.PEER, "this fabric and the peer do not have the same secret"),
}


def refusal(code: StatusCode, text: str = "", raw: int = 0) -> EngineStatusError:
    """Return the error that a synchronous engine call raises for this code."""
    return EngineStatusError(int(code), int(code.kind), raw, f"{code.text}: {text}" if text else code.text)
