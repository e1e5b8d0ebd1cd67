"""Values that cross layers: frozen, small, without behaviour that could block.

Common: imported by every layer, imports none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

AccessMode = Literal["local", "read", "write", "read-write"]

ACCESS_BITS: Mapping[str, int] = {"local": 0, "write": 1, "read": 2, "read-write": 3}
"""What remote peers may do: bit 0 write into the region, bit 1 read from it (the native `Access` enum)."""

MAX_IMM = (1 << 20) - 1
"""Largest immediate value that users may name."""

MAX_BOX_DIMENSIONS, BOX_RUN_ALIGN, LEAST_BOX_BYTES = 8, 64, 256
"""Of boxes that are gathered: dimensions from run to run; runs are multiples of so many bytes; bytes of a box."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What an awaited transfer did.

    Attributes:
        bytes: payload bytes moved.
        duration: seconds from submission to completion.
        rails: indices of the rails that were used.
    """

    bytes: int
    duration: float
    rails: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RailInfo:
    """One opened rail: what really carries the bytes, never a silent fallback.

    Attributes:
        can_read: `Fabric.read` works over it.
        can_gather: weights that lie apart are gathered and summed over it, to peers that only it reaches.
        reason: why it was opened: "named", or why `rails="auto"` chose it.
        admission: "secret": peers prove `FabricConfig.secret`; "open": whoever reaches the rail is a peer.
    """

    provider: str
    device: str
    library: str
    version: str
    gbits_per_s: float
    ordered: bool
    can_read: bool
    up: bool
    can_gather: bool = False
    reason: str = ""
    admission: str = "open"


@dataclass(frozen=True, slots=True)
class RailLeftOut:
    """A rail that `rails="auto"` did not open.

    Attributes:
        rail: a provider, or `provider:device`.
        reason: why, and what to do where it is wanted.
    """

    rail: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """One peer as the engine sees it. state: connecting, connected, lost or disconnected."""

    id: int
    incarnation: int
    state: str
    lanes: int
    provider: str
    bytes_sent: int
    ops_in_flight: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of one fabric since it was opened. Field names are those of the native EngineStatistics."""

    counters: Mapping[str, int]
    peers: tuple[PeerStatistics, ...] = ()
    rails: tuple[RailInfo, ...] = ()

    def __getattr__(self, name: str) -> int:
        """Return one counter by its name, for example `statistics.stale_arrivals`."""
        counters: Mapping[str, int] = object.__getattribute__(self, "counters")
        try:
            return counters[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One registered region, as `fabric.regions()` lists them.

    Attributes:
        id: number of the region in its fabric, as in error texts.
        length_bytes, device, access: what was registered, where, with which rights for peers.
        generation: of its keys; grows with each revocation.
        quarantined: a device may still touch it, so it is never given back.
        refused: with `rails="auto"`, the rails that did not take the memory, and why; peers that only they reach
            cannot use it. "" when all did.
        age_s: seconds since it was registered.
        cost_s: seconds that registering took.
    """

    id: int
    length_bytes: int
    device: str
    access: AccessMode
    generation: int
    quarantined: bool
    age_s: float
    cost_s: float
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One line of `fabric.why()`: who waits, for what, what is missing, from whom."""

    what: str
    waits_for: str
    have: int
    need: int
    missing_from: tuple[str, ...] = ()
    since: float = 0.0
    detail: Mapping[str, int] = field(default_factory=dict)


TraceWhat = Literal["submit", "start", "post", "done", "finish", "arrival", "sleep", "wake", "peer"]
"""What a trace event reports; the native `TracePoint` numbers them in this order."""


class TraceEvent(NamedTuple):
    """One event of `fabric.take_trace()`.

    time_ns is on CLOCK_MONOTONIC, which all processes of a host share. subject and value, by what it reports: start and
    finish: number of the transfer, its bytes; post: rail, requests taken; arrival: imm, its worth; sleep: 0, longest
    sleep in ns; peer: id, its new state.
    """

    time_ns: int
    what: TraceWhat
    subject: int
    value: int
