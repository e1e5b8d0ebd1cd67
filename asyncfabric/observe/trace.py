"""Traces of fabrics as files, and several of them as one picture for Perfetto or chrome://tracing.

A recording is what one fabric's `take_trace()` gave, with its name and its clock. Fabrics of one host share a clock, so
their events are put in order exactly; between hosts the wall clocks are compared, which is as good as NTP keeps them.
Pure functions but for `Recording.of` and the files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncfabric.observe import lanes
from asyncfabric.observe.spans import Span
from asyncfabric.types import TraceEvent
from asyncfabric.unreadable import UNREADABLE

if TYPE_CHECKING:
    from asyncfabric._api.fabric import Fabric

VERSION = 1
TRACKS = ("transfers", "worker", "rails", "arrivals", "peers")


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The trace of one process: of its fabric, and of what it did for requests.

    Attributes:
        name: what the picture calls it.
        host: what distinguishes hosts, and their boots: events of equal hosts have one clock.
        wall_offset_ns: add it to an event's time for nanoseconds since 1970.
        events: of the fabric, empty for a process without one.
        spans: of requests.
        gaps: how often events were lost, since the engine's ring was full.
        clock_error_ns: how wrong `wall_offset_ns` may be, where that was measured.
    """

    name: str
    host: str
    wall_offset_ns: int
    events: list[TraceEvent]
    spans: list[Span] = []
    gaps: int = 0
    clock_error_ns: int = 0
    version: int = VERSION

    @classmethod
    def of(cls, fabric: Fabric, name: str) -> Recording:
        """Take the newest events of a fabric whose trace is on; see `fabric.set_trace`.

        Raises:
            ValueError: the name is empty.
            ClosedError: the fabric is closed.
        """
        return cls.here(name, fabric.take_trace())

    @classmethod
    def here(cls, name: str, events: list[TraceEvent], spans: Sequence[Span] = (), gaps: int = 0) -> Recording:
        """Return a recording of this process; raises ValueError for an empty name."""
        if not name:
            raise ValueError("a recording needs a name to be distinguished by, got ''")
        offset = time.time_ns() - time.monotonic_ns()
        return cls(name=name, host=boot_id(), wall_offset_ns=offset, events=events, spans=list(spans), gaps=gaps)

    def save(self, path: Path) -> None:
        """Write the recording as JSON."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no recording, or one of another version.
        """
        try:
            recording = msgspec.json.decode(path.read_bytes(), type=cls)
        except UNREADABLE as error:
            raise ValueError(f"{path} is no recording: {error}") from None
        return recording._known(path)

    @classmethod
    def load_all(cls, path: Path) -> list[Recording]:
        """Read what `save` wrote, or the recordings that a picture of `merge` was drawn from.

        Raises:
            OSError: it cannot be read.
            ValueError: it is neither, or of another version.
        """
        try:
            picture = msgspec.json.decode(path.read_bytes(), type=_Picture)
        except UNREADABLE:
            return [cls.load(path)]
        return [recording._known(path) for recording in picture.recordings]

    def _known(self, path: Path) -> Recording:
        if self.version != VERSION:
            raise ValueError(f"{path} is a recording of version {self.version}, this program reads {VERSION}")
        return self


class _Picture(msgspec.Struct, frozen=True):
    """What `merge` returned, as far as it is read again."""

    recordings: list[Recording]


def merge(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return one trace of several recordings, in the Trace Event Format; write it as JSON and open it in Perfetto.

    Each fabric is a process of five tracks: transfers (begin to end), the worker's sleep, requests that rails took,
    arrivals with their sum for each imm, and states of peers. What began before the oldest event kept is not drawn;
    what had not ended goes on to the end of its recording and is marked. Spans of requests lie on lanes below, with an
    arrow where a request goes from one process to another. The picture carries the recordings, which viewers pass over:
    `Recording.load_all` reads them, to be merged with others.
    """
    clocks = _clocks(recordings)
    zero = min(
        (time_ns for one, clock in zip(recordings, clocks, strict=True) for time_ns in _times(one, clock)), default=0
    )
    events: list[dict[str, Any]] = []
    placed: list[lanes.Placed] = []
    for number, (recording, clock) in enumerate(zip(recordings, clocks, strict=True), 1):
        events += _names(number, recording)
        placed += lanes.place(recording.spans, number, clock - zero)
        drawing = _Drawing(number, clock - zero)
        for event in sorted(recording.events):
            events += drawing.draw(event)
        events += drawing.rest()
    events += lanes.draw(placed)
    kept: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(list(recordings)))
    return {"displayTimeUnit": "ns", "traceEvents": events, "recordings": kept}


def _clocks(recordings: Sequence[Recording]) -> list[int]:
    first: dict[str, int] = {}
    return [first.setdefault(recording.host, recording.wall_offset_ns) for recording in recordings]


def _times(recording: Recording, clock: int) -> Iterator[int]:
    yield from (event.time_ns + clock for event in recording.events)
    yield from (span.begin_ns + clock for span in recording.spans)


def _names(process: int, recording: Recording) -> Iterator[dict[str, Any]]:
    name, error_ns, gaps = recording.name, recording.clock_error_ns, recording.gaps
    notes = [f"clock +- {error_ns / 1000:.3g} us"] if error_ns else []
    notes += [f"events lost {gaps} times"] if gaps else []
    shown = f"{name} ({', '.join(notes)})" if notes else name
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": shown}}
    for track, text in enumerate(TRACKS if recording.events else ()):
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": text}}


class _Drawing:
    """The events of one fabric, oldest first, as events of the picture."""

    def __init__(self, process: int, shift_ns: int) -> None:
        self._process = process
        self._shift_ns = shift_ns
        self._begun: set[int] = set()
        self._asleep: int | None = None
        self._counted: dict[int, int] = {}
        self._last_ns = 0

    def draw(self, event: TraceEvent) -> Iterator[dict[str, Any]]:
        self._last_ns = event.time_ns
        match event.what:
            case "start" if event.subject not in self._begun:
                self._begun.add(event.subject)
                yield self._transfer("b", event.time_ns, event.subject, {"bytes": event.value})
            case "finish" if event.subject in self._begun:
                self._begun.remove(event.subject)
                yield self._transfer("e", event.time_ns, event.subject, {"bytes": event.value})
            case "sleep":
                self._asleep = event.time_ns
            case "wake" if self._asleep is not None:
                yield self._sleep(event.time_ns)
            case "arrival":
                self._counted[event.subject] = self._counted.get(event.subject, 0) + event.value
                name, total = f"imm {event.subject}", self._counted[event.subject]
                yield self._event("C", "arrivals", event.time_ns, name=name, args={"counted": total})
            case "post":
                name, args = f"rail {event.subject}", {"requests": event.value}
                yield self._event("i", "rails", event.time_ns, name=name, s="t", args=args)
            case "peer":
                name, args = f"peer {event.subject:x}", {"state": event.value}
                yield self._event("i", "peers", event.time_ns, name=name, s="t", args=args)

    def rest(self) -> Iterator[dict[str, Any]]:
        """Yield the ends of what had not ended."""
        for number in sorted(self._begun):
            yield self._transfer("e", self._last_ns, number, {"unfinished": True})
        if self._asleep is not None:
            yield self._sleep(self._last_ns)

    def _transfer(self, phase: str, time_ns: int, number: int, args: dict[str, Any]) -> dict[str, Any]:
        identity = f"{self._process}.{number}"
        return self._event(phase, "transfers", time_ns, name="transfer", cat="transfer", id=identity, args=args)

    def _sleep(self, until_ns: int) -> dict[str, Any]:
        begin_ns, self._asleep = self._asleep or until_ns, None
        return self._event("X", "worker", begin_ns, name="asleep", dur=(until_ns - begin_ns) / 1000)

    def _event(self, phase: str, track: str, time_ns: int, **fields: Any) -> dict[str, Any]:
        place = {"pid": self._process, "tid": TRACKS.index(track)}
        return {"ph": phase, **place, "ts": (time_ns + self._shift_ns) / 1000, **fields}


def boot_id() -> str:
    """Return what distinguishes this boot of this host from all others: processes with the same one share a clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
