"""The Engine protocol: the one seam between Python and whatever moves the bytes.

Implemented by `asyncfabric._native.Engine` (compiled) and by `asyncfabric.testing.FakeEngine`. Submissions may
be called from any thread, never block and never await; completions are taken by one thread at a time.
Status codes and their numbers are those of native/include/asyncfabric/status.h. No policy lives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol


class CompletionKind(IntEnum):
    """What a completion reports; numbers of the native enum."""

    OP = 0
    CONTROL = 1
    COUNTER = 2
    WATCH = 3
    PEER_LOST = 4
    MESSAGE = 5
    WRITABLE = 6
    CLOSED = 7


class StatusKind(IntEnum):
    """How much is broken; numbers of the native enum."""

    NONE = 0
    BUSY = 1
    CLOSED = 2
    CANCELLED = 3
    VALUE = 4
    STALE = 5
    TRANSFER = 6
    PEER = 7
    DEVICE = 8
    INTERNAL = 9


class Completion(NamedTuple):
    """One completion. `code`, `kind_of_status` and `raw` are the native Status."""

    cookie: int
    kind: int
    code: int
    status_kind: int
    raw: int
    value: int
    bytes: int
    duration_ns: int
    rails: int
    peer: int


class KeyInfo(NamedTuple):
    """What the bytes of a region key state."""

    incarnation: int
    region: int
    generation: int
    length: int
    access: int
    rails: int


class RegionInfo(NamedTuple):
    """A region as the engine sees it."""

    base: int
    length: int
    device: int
    access: int
    generation: int
    quarantined: bool
    refused: str = ""


class ClosingInfo(NamedTuple):
    """A counter that is closed while peers have not confirmed it: its imm cannot be opened again."""

    imm: int
    age_ns: int
    peers: tuple[int, ...]


class OpProgress(NamedTuple):
    """How far a submitted op is: what rails have taken of it, and what left for certain."""

    bytes_total: int
    bytes_posted: int
    bytes_done: int
    outstanding: int
    peer: int
    known: bool


class EngineStatusError(Exception):
    """A synchronous engine call refused. args: (code, status_kind, raw, text); translated by `_bridge.faults`."""

    @property
    def code(self) -> int:
        """Native StatusCode number."""
        return int(self.args[0])

    @property
    def status_kind(self) -> int:
        """Native StatusKind number."""
        return int(self.args[1])

    @property
    def raw(self) -> int:
        """Number from the NIC, the library or the OS."""
        return int(self.args[2])


class Engine(Protocol):
    """What the upper layers may ask of an engine. All offsets and lengths are bytes; ids are opaque positive ints.

    Every method raises EngineStatusError (BUSY, CLOSED, VALUE or STALE) when the call itself is refused.
    `imm` is -1 (none) or 0..2**20-1.
    """

    def address(self) -> bytes: ...
    def incarnation(self) -> int: ...
    def rails(self) -> list[dict[str, Any]]: ...  # keys: fields of asyncfabric.types.RailInfo
    def rails_left_out(self) -> list[dict[str, str]]: ...  # keys: fields of asyncfabric.types.RailLeftOut
    def peers(self) -> list[dict[str, Any]]: ...  # keys: fields of PeerStatistics; state as int
    def statistics(self) -> dict[str, int]: ...
    def progress(self, op: int) -> OpProgress: ...
    def last_error(self) -> str: ...
    def reason(self, cookie: int) -> str: ...  # why a data call ended badly; "" when its status states all
    def set_trace(self, on: bool) -> None: ...
    def take_trace(self) -> list[tuple[int, int, int, int]]: ...  # fields of TraceEvent; what as its number

    # Control calls; end as CONTROL completions whose value is the new id.
    def submit_register(self, cookie: int, address: int, length: int, device: int, access: int) -> None: ...
    def submit_allocate(self, cookie: int, length: int, device: int, access: int) -> None: ...
    def submit_revoke(self, cookie: int, region: int) -> None: ...
    def submit_release(self, cookie: int, region: int) -> None: ...
    def submit_connect(self, cookie: int, address: bytes) -> None: ...
    def submit_disconnect(self, cookie: int, peer: int) -> None: ...
    def submit_close(self, cookie: int, cancel_unposted: bool) -> None: ...

    # Look-ups.
    def check_address(self, address: bytes) -> int: ...  # incarnation
    def region_info(self, region: int) -> RegionInfo: ...
    def region_key(self, region: int, access: int, offset: int, length: int, strict: bool = False) -> bytes: ...
    def region_memory(self, region: int) -> memoryview: ...  # writable bytes of a host region, for allocated regions
    def open_key(self, key: bytes) -> tuple[int, KeyInfo]: ...
    def close_key(self, key: int) -> None: ...
    def peer_of_key(self, key: int) -> int: ...  # 0: its next use connects
    def key_memory(self, key: int) -> memoryview | None: ...  # writable bytes of a peer that this process has mapped

    # Data ops; return the op id, end as OP completions.
    def submit_write(
        self,
        cookie: int,
        region: int,
        offset: int,
        length: int,
        key: int,
        target_offset: int,
        imm: int,
        after: int = 0,
    ) -> int: ...
    def submit_read(self, cookie: int, region: int, offset: int, length: int, key: int, target_offset: int) -> int: ...
    def submit_write_pages(
        self,
        cookie: int,
        region: int,
        source_pages: Any,  # C-contiguous int64 buffer
        key: int,
        target_pages: Any,  # C-contiguous int64 buffer of the same length
        page_bytes: int,
        source_stride: int,
        target_stride: int,
        source_offset: int,
        target_offset: int,
        imm: int,
        after: int = 0,
    ) -> int: ...
    def submit_read_pages(
        self,
        cookie: int,
        region: int,
        source_pages: Any,  # C-contiguous int64 buffer: pages behind the key
        key: int,
        target_pages: Any,  # C-contiguous int64 buffer of the same length: pages of the region
        page_bytes: int,
        source_stride: int,
        target_stride: int,
        source_offset: int,
        target_offset: int,
    ) -> int: ...
    def submit_write_boxes(
        self,
        cookie: int,
        region: int,
        boxes: Any,  # C-contiguous int64 buffer of two dimensions
        key: int,
        sums: Any,  # writable uint64 buffer, one number a box; the caller keeps it until the op has ended
        imm: int,
    ) -> int: ...
    def mark_stream(self, stream: int, device: int) -> int: ...
    def mark_word(self, watch: int, value: int) -> int: ...
    def drop_mark(self, mark: int) -> None: ...
    def submit_scatter(
        self, cookie: int, region: int, targets: Sequence[tuple[int, int, int, int]], imm: int
    ) -> int: ...
    def submit_signal(self, cookie: int, peers: Sequence[int], imm: int) -> int: ...
    def submit_send(self, cookie: int, peer: int, payload: bytes) -> int: ...
    def cancel(self, op: int) -> None: ...
    def arm_writable(self, cookie: int) -> None: ...

    # Counters and watch words.
    def open_counter(self, imm: int) -> tuple[int, int]: ...  # (counter id, imm)
    def close_counter(self, counter: int) -> None: ...
    def arm_closed(self, cookie: int, imm: int) -> None: ...  # one CONTROL completion when open_counter may be tried
    def closings(self, imm: int) -> list[ClosingInfo]: ...  # closes that peers have not confirmed; -1: of any imm
    def counter_value(self, counter: int) -> int: ...
    def arm_counter(self, counter: int, cookie: int, target: int) -> None: ...  # one COUNTER completion; replaces
    def spin_counter(self, counter: int, target: int, deadline_ns: int) -> int: ...  # value; kTimeout raises
    def counter_flag(self, counter: int) -> int: ...
    def stream_wait(self, counter: int, stream: int, device: int, target: int) -> None: ...
    def open_watch(self) -> tuple[int, int]: ...  # (watch id, address of the word)
    def watch_load(self, watch: int) -> int: ...
    def watch_store(self, watch: int, value: int) -> None: ...  # stores and wakes the worker
    def arm_watch(self, watch: int, cookie: int, seen: int) -> None: ...  # one WATCH completion when the word != seen
    def close_watch(self, watch: int) -> None: ...

    # Completions.
    def completion_fd(self) -> int: ...
    def arm(self) -> bool: ...  # False: completions are waiting already
    def disarm(self) -> None: ...  # clears the fd after a wake-up
    def poll(self, limit: int) -> list[Completion]: ...
    def assist(self) -> None: ...  # any thread that polls: brings on what is under way
    def look(self) -> bool: ...  # whether poll() has something to return; while it has not, assists first
    def take_messages(
        self, limit: int, assist: bool = False
    ) -> list[tuple[int, bytes]]: ...  # (peer id, payload); any thread, never waits; `assist`: as assist(), before
    def spin_messages(
        self, limit: int, deadline_ns: int
    ) -> list[tuple[int, bytes]]: ...  # one or more; kTimeout raises
    def step(self) -> int: ...  # manual polling only
    def close(self) -> None: ...  # joins threads; idempotent
