"""What `/look` answers: health, metrics, waits, peers and updates of a node at once, read with their types. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.json import Decoder

MOST_INTEGER: Final = (1 << 63) - 1

NodeReport = Mapping[str, Any]


class ReportedWait(Struct, frozen=True):
    """One line of `/why`; see `asyncfabric.Waiting`."""

    what: str
    waits_for: str
    have: float
    need: float
    missing_from: list[str] = []
    for_s: float | None = None


class ReportedPeer(Struct, frozen=True):
    """One row of `/peers`; what the control plane does not know has its default."""

    plane: str
    peer: str
    state: str
    provider: str = ""
    bytes_sent: Annotated[int, Meta(ge=0, le=MOST_INTEGER)] = 0
    ops_in_flight: Annotated[int, Meta(ge=0, le=MOST_INTEGER)] = 0


class ReportedHealth(Struct, frozen=True):
    """What `/health` answers."""

    name: str = ""
    role: str = ""
    state: str = ""
    reason: str = ""
    missing: dict[str, str] = {}


class NodeLook(Struct, frozen=True):
    """A whole answer; pages that a role has not are empty."""

    health: ReportedHealth
    metrics: dict[str, float]
    why: list[ReportedWait] = []
    peers: list[ReportedPeer] = []
    updates: list[dict[str, Any]] = []


LOOK = Decoder(NodeLook)
