"""Session tables joined by queues that lose, repeat, reorder and cut frames, and what must hold whatever they do.

Pure: the clock is a number. Checks CS-1 (in order, once, or lost) and CS-2 (one incarnation under a name, replaced ones
are silent) after each step; CS-3 (nothing raises) is checked by getting that far.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from asyncfabric.control.events import (
    Change,
    Close,
    Deliver,
    Dial,
    Dialed,
    DialFailed,
    Emit,
    Event,
    Leave,
    ParcelTaken,
    Path,
    PathLost,
    Received,
    SendParcel,
    Tick,
)
from asyncfabric.control.messages import Identity
from asyncfabric.control.session import SessionConfig
from asyncfabric.control.session_table import SessionTable

CONFIG = SessionConfig(max_frame_bytes=8192, window_bytes=16384)
NAMES = ("a", "b", "c")
CHANNELS = ("x", "y")
BODY_BYTES = 5000  # three of them fill a window


@dataclass
class Queue:
    """Frames on their way in one direction of one connection."""

    target: int
    path: Path
    frames: list[bytes] = field(default_factory=list)


class Process:
    """One table, what it delivered, and what was reported to it about its peers."""

    def __init__(self, number: int, identity: Identity, nonces: itertools.count[int]) -> None:
        self.number = number
        self.identity = identity
        self.table = SessionTable(identity, CONFIG, address=f"at {identity}", nonce=lambda: next(nonces))
        self.posted = 0
        self.sent_to: dict[Identity, list[int]] = defaultdict(list)
        self.untaken: list[ParcelTaken] = []
        self.last: dict[Identity, int] = {}
        self.retired: set[Identity] = set()
        self.broken: set[Identity] = set()  # lost since the last delivery
        self.states: dict[Identity, str] = {}
        self.delivered: dict[Identity, list[int]] = defaultdict(list)


class World:
    """Three names, any number of processes, connections between them."""

    def __init__(self, *, checked: bool = True) -> None:
        self.checked = checked  # False among forged frames, which may well be believed
        self.now_ns = 0
        self.processes: list[Process] = []
        self.living: dict[str, int] = {}
        self.queues: dict[tuple[int, Path], Queue] = {}  # by who sends, over which of its paths
        self.closed: set[tuple[int, Path]] = set()
        self._numbers = itertools.count(1)
        self._nonces = itertools.count(1000)
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process; one that had the name lives on as a ghost, as a stopped process does."""
        number = len(self.processes)
        self.processes.append(Process(number, Identity(name, next(self._numbers)), self._nonces))
        self.living[name] = number

    def dial(self, source: int, target: int) -> None:
        """Open a connection."""
        number = next(self._numbers)
        over_there = b"%d" % number
        self.queues[source, number] = Queue(target, over_there)
        self.queues[target, over_there] = Queue(source, number)
        self.feed(source, Dial(number, f"at {self.processes[target].identity}"))

    def post(self, source: int, to: Identity, channel: str, body_bytes: int = BODY_BYTES) -> bool:
        """Send the next number, if there is room and a session."""
        process = self.processes[source]
        peer = process.table.names.peers.get(to)
        if peer is None or peer.state != "ready" or not process.table.admits(to, channel, body_bytes):
            return False
        process.posted += 1
        process.sent_to[to].append(process.posted)
        self.feed(source, SendParcel(to, channel, process.posted.to_bytes(8, "big").ljust(body_bytes, b"."), None))
        return True

    def feed(self, number: int, event: Event) -> None:
        """Feed one table and do what it orders."""
        process = self.processes[number]
        for action in process.table.feed(event, self.now_ns):
            match action:
                case Emit(path, frame):
                    self._emit(number, path, frame)
                case Deliver(_, arrival, taken):
                    if not self.checked:
                        process.untaken.append(taken)
                        continue
                    self._deliver(process, arrival.sender, int.from_bytes(arrival.body[:8], "big"), taken)
                case Change(change):
                    assert not self.checked or process.states.get(change.peer) != change.state, "the same change twice"
                    process.states[change.peer] = change.state
                    if self.checked:
                        self._follow(process, change.peer, change.state, change.reason)
                    if change.state == "lost":
                        process.broken.add(change.peer)
                case Close(path):
                    self.closed.add((number, path))
                case Dialed() | DialFailed() | _:
                    pass
        if self.checked:
            self.check(process)

    def _follow(self, process: Process, peer: Identity, state: str, reason: str) -> None:
        """CS-2: who was replaced was replaced by a later one, and never comes back."""
        if state == "lost" and reason.startswith("replaced by"):
            assert int(reason.rpartition("@")[2], 16) > peer.incarnation, f"CS-2: {peer} {reason}"
            process.retired.add(peer)
        assert state == "lost" or peer not in process.retired, f"CS-2: {peer} is back"

    def _emit(self, number: int, path: Path, frame: bytes) -> None:
        queue = self.queues.get((number, path))
        if queue is not None and (number, path) not in self.closed:
            queue.frames.append(frame)

    def _deliver(self, process: Process, sender: Identity, posted: int, taken: ParcelTaken) -> None:
        assert process.states.get(sender) in ("ready", "draining"), "a parcel of a peer that is lost"
        last = process.last.get(sender, 0)
        assert posted > last, f"CS-1: {posted} of {sender} came after {last}"
        sent = next(other for other in self.processes if other.identity == sender).sent_to[process.identity]
        skipped = [number for number in sent if last < number < posted]
        assert not skipped or sender in process.broken, f"CS-1: {skipped} of {sender} vanished and nobody was reported"
        process.broken.discard(sender)
        process.last[sender] = posted
        process.delivered[sender].append(posted)
        process.untaken.append(taken)

    def check(self, process: Process) -> None:
        """CS-2, and agreement of what was reported with what is."""
        peers = process.table.names.peers
        names = [identity.name for identity in peers]
        assert len(set(names)) == len(names), f"CS-2: {sorted(map(str, peers))}"
        reported = {identity: state for identity, state in process.states.items() if state != "lost"}
        assert reported == {identity: peer.state for identity, peer in peers.items()}
        for identity in process.states:
            newer = any(other.name == identity.name and other.incarnation > identity.incarnation for other in peers)
            assert not (newer and identity in peers), f"CS-2: {identity} lives beside its successor"

    def move(self, queue: Queue, index: int = 0) -> None:
        """Bring one frame home; index 0 keeps the order."""
        frame = queue.frames.pop(index)
        self.feed(queue.target, Received(queue.path, frame))

    def waiting(self) -> list[Queue]:
        """Return the queues that hold frames."""
        return [queue for queue in self.queues.values() if queue.frames]

    def settle(self, seconds: float = 12.0) -> None:
        """Let a faultless world run: frames come in order, listeners take, clocks tick, closed paths are noticed."""
        end = self.now_ns + int(seconds * 1e9)
        while self.now_ns < end:
            self.exchange()
            self.now_ns += 250_000_000
            for process in self.processes:
                self.feed(process.number, Tick())

    def exchange(self) -> None:
        """Bring everything home that is under way, and all that follows from it."""
        self.take_all()
        while queues := self.waiting():
            for queue in queues:
                while queue.frames:
                    self.move(queue)
            self.take_all()
        for number, path in list(self.closed):
            queue = self.queues.get((number, path))
            # ZeroMQ: a dialer that closes ends the connection; one that accepted leaves the closing to the other.
            if queue is not None and isinstance(path, int) and (queue.target, queue.path) not in self.closed:
                self.feed(queue.target, PathLost(queue.path, "closed"))
                self.closed.add((queue.target, queue.path))

    def take_all(self) -> None:
        """Let the listeners take what they have."""
        for process in self.processes:
            untaken, process.untaken = process.untaken, []
            for taken in untaken:
                self.feed(process.number, taken)

    def leave(self, source: int, peer: Identity) -> None:
        """Begin to drain."""
        self.feed(source, Leave(peer))
