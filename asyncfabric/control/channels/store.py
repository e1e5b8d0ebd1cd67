"""StoreChannels: channels over a key-value store, such as a torch.distributed TCPStore that a training has anyway.

Event loop's thread, apart from the store's calls, which block: they run in threads, one at a time and in order. A
cancelled caller waits for its call for at most SETTLE_S: an interpreter that ends while a thread is inside torch's C++
aborts, and a store whose host is gone may not answer for minutes. A member polls one counter, its bell, which whoever
sends to it adds to; more often while messages come and go. Members of one process hand theirs over without the store.

    PREFIX/members           how many members were ever opened        PREFIX/member/I     name of member I
    PREFIX/bell/I            added to after each message to it        PREFIX/beat/I       added to while it lives
    PREFIX/left/I            it closed                                PREFIX/taken/I/J     messages of I that J received
    PREFIX/message/I/J/N     message N of I to J, deleted by J
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import WINDOW, Codec
from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.errors import BrokenError, PeerError

POLL_S = 0.005
BUSY_POLL_S, BUSY_S = 0.0005, 0.1
"""How often a process looks for so long after a message: one is often answered."""
DEADLINE_S = 5.0
SETTLE_S = 1.0
BEATS = 5
"""Signs of life in a deadline."""

Message = TypeVar("Message")
Result = TypeVar("Result")


class KeyStore(Protocol):
    """What is used of a store; torch.distributed's TCPStore, FileStore, HashStore and PrefixStore have it."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins with 0; return what it is now."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""

    def delete_key(self, key: str) -> bool:
        """Forget a key."""


def connected_apart(store: KeyStore) -> KeyStore:
    """Return the same store over another connection, where its kind can have one (torch from 2.8 on).

    A TCPStore answers one call of a connection at a time. Over the program's own everybody would wait while the program
    waits there for a key, or torch does for the ranks of a new group. It blocks until the store answers, for as long as
    the store's own timeout.
    """
    clone = getattr(type(store), "clone", None)
    return clone(store) if clone is not None else store


@dataclass(slots=True)
class _StoreMember:
    """A member of any process, as seen here; `silent`: looks at its beat that found no new one."""

    number: int
    name: str
    beat: int = -1
    silent: int = 0


@dataclass(slots=True)
class _Mailbox:
    """What a member of this process keeps: the bell, and by peer what was sent, allowed, fetched and acknowledged."""

    channel: MemberChannel[Any]
    number: int
    bell: int = -1
    sent: dict[int, int] = field(default_factory=dict)
    allowed: dict[int, int] = field(default_factory=dict)
    fetched: dict[int, int] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)


class StoreChannels(Generic[Message]):
    """The members of this process, and those of others that use the same store and prefix.

    A prefix is for one life of a job: what members that died had not received stays in the store.
    """

    def __init__(
        self,
        store: KeyStore,
        codec: Codec[Message],
        *,
        prefix: str = "asyncfabric",
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Carry the messages of a codec over a store; who gives no sign of life for `deadline_s` is lost.

        Where the program itself waits for keys of the store, give `connected_apart(store)`.

        Raises:
            ValueError: window or deadline_s is not positive.
        """
        if window < 1 or not deadline_s > 0:
            raise ValueError(f"window and deadline_s must be positive, got {window} messages, {deadline_s} s")
        self._store = store
        self._codec = codec
        self._prefix = prefix
        self._window = window
        self._deadline_s = deadline_s
        self._order = anyio.CapacityLimiter(1)  # the calls are made in order
        self._lock = threading.Lock()  # and not at the same time, where a cancelled caller gave its place back
        self._threads = anyio.CapacityLimiter(inf)
        self._boxes: dict[str, _Mailbox] = {}
        self._peers: dict[str, _StoreMember] = {}
        self._known = 0
        self._unnamed_s = 0.0
        self._failure = ""
        self._beat_s = -deadline_s
        self._busy_until_s = 0.0
        self._sent = Notice()

    async def open(self, name: str) -> MemberChannel[Message]:
        """Join as a member of this name; one of the same name in another process is replaced.

        Raises:
            ValueError: the name is taken in this process.
            BrokenError: the store does not answer.

        Cancellation: others may find the name, and lose it after `deadline_s`.
        """
        if name in self._boxes:
            raise ValueError(f"{name!r} is there already")

        def join() -> int:
            number = self._store.add(self._key("members"), 1) - 1
            self._store.set(self._key("member", number), name)
            return number

        box = _Mailbox(MemberChannel(name, self, self._codec), await self._call(join))
        self._boxes[name] = box
        for peer in self._peers.values():
            box.channel.find(peer.name)
        return box.channel

    async def run(self) -> None:
        """Receive, and give signs of life, for ever; nothing comes without it.

        Raises:
            BrokenError: the store does not answer any more, or others lost a member of this process.

        Cancellation: the channels end, and the peers lose them after `deadline_s`.
        """
        try:
            while True:
                changes = await self._call(self._poll)
                for change in changes:
                    change()
                if changes:
                    self._note_busy()
                if monotonic() < self._busy_until_s:
                    await anyio.sleep(BUSY_POLL_S)
                else:
                    with anyio.move_on_after(POLL_S):
                        await self._sent.wait()
        finally:
            for box in self._boxes.values():
                box.channel.end()

    # ---- Carrier

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Put a message into the store; see Carrier.

        Cancellation: the message is stored whole, or not at all.
        """
        while True:
            peer = self._peers.get(to)
            if peer is None:
                raise PeerError(f"there is no session with {to}", remedy="is its process alive, on the same store?")
            box = self._boxes.get(to)
            if box is not None and box.number == peer.number:
                if self._hand_over(self._boxes[source], box, data):
                    return
            elif await self._call(partial(self._send, self._boxes[source], peer.number, data)):
                self._note_busy()
                self._sent.notify()
                return
            await anyio.sleep(POLL_S)

    async def leave(self, name: str) -> None:
        """Note in the store that a member is gone; see Carrier.

        Cancellation: it is noted all the same once the store answers.
        """
        box, peers = self._boxes.pop(name), [peer.number for peer in self._peers.values()]

        def close() -> None:
            self._store.set(self._key("left", box.number), "it was closed")
            for number in peers:
                self._store.add(self._key("bell", number), 1)

        await self._call(close)

    def taken(self, source: str, to: str) -> None:
        """The next poll looks at what was received."""

    async def more(self, changed: Notice) -> None:
        """Wait for a change.

        Cancellation: only this wait ends.
        """
        await changed.wait()

    def gather_nowait(self) -> None:
        """Everything is there already."""

    # ---- in the threads

    def _send(self, box: _Mailbox, to: int, data: bytes) -> bool:
        """Store a message, or return False while the recipient's window is full."""
        number = box.sent.get(to, 0)
        if number - box.allowed.get(to, 0) >= self._window:
            box.allowed[to] = int(self._read("taken", box.number, to) or 0)
            if number - box.allowed[to] >= self._window:
                return False
        self._store.set(self._key("message", box.number, to, number), data)
        box.sent[to] = number + 1
        self._store.add(self._key("bell", to), 1)
        return True

    def _poll(self) -> list[Callable[[], None]]:
        """Return what happened, to be done on the event loop in this order."""
        changes: list[Callable[[], None]] = []
        boxes, peers = list(self._boxes.values()), dict(self._peers)
        beats = monotonic() - self._beat_s > self._deadline_s / BEATS
        if beats:
            self._beat_s = monotonic()
            for box in boxes:
                if reason := self._read("left", box.number):
                    raise ConnectionError(f"others lost {box.channel.name}: {reason.decode()}")
                self._store.add(self._key("beat", box.number), 1)
        for peer in self._new_peers():
            if (old := peers.get(peer.name)) is not None:
                changes += [*self._fetch(old, boxes), partial(self._lose, old, "it began anew")]
            peers[peer.name] = peer
            changes.append(partial(self._find, peer))
        if self._was_rung(boxes) or beats or changes:
            for peer in peers.values():
                reason_of_end = self._end_of(peer, beats)
                changes += self._fetch(peer, boxes)  # after the question: everything that it sent is there
                if reason_of_end:
                    changes.append(partial(self._lose, peer, reason_of_end))
        return changes

    def _new_peers(self) -> Iterator[_StoreMember]:
        members = self._store.add(self._key("members"), 0)
        while self._known < members:
            name = self._read("member", self._known)
            if name is None:  # it has its number and not yet its name; unless it died in between
                self._unnamed_s = self._unnamed_s or monotonic()
                if monotonic() - self._unnamed_s < self._deadline_s:
                    return
            self._unnamed_s = 0.0
            self._known += 1
            if name is not None:
                yield _StoreMember(self._known - 1, name.decode())

    def _was_rung(self, boxes: list[_Mailbox]) -> bool:
        """Acknowledge what was received; return whether there may be more."""
        rung = False
        for box in boxes:
            bell = self._store.add(self._key("bell", box.number), 0)
            rung, box.bell = rung or bell != box.bell, bell
            for peer in list(self._peers.values()):
                fetched = box.fetched.get(peer.number, 0)
                taken = max(0, fetched - box.channel.untaken(peer.name))
                if taken > box.acknowledged.get(peer.number, 0):
                    self._store.set(self._key("taken", peer.number, box.number), str(taken))
                    box.acknowledged[peer.number] = taken
                    rung = True  # what the window did not take in
        return rung

    def _fetch(self, peer: _StoreMember, boxes: list[_Mailbox]) -> list[Callable[[], None]]:
        """Take a peer's messages out of the store, as many as its window has room for."""
        found: list[Callable[[], None]] = []
        if any(box.number == peer.number for box in boxes):
            return found  # it hands its messages over
        for box in boxes:
            number, room = box.fetched.get(peer.number, 0), self._window - box.channel.untaken(peer.name)
            while room > 0 and (data := self._read("message", peer.number, box.number, number)) is not None:
                self._store.delete_key(self._key("message", peer.number, box.number, number))
                found.append(partial(box.channel.put, peer.name, data))
                number, room = number + 1, room - 1
            box.fetched[peer.number] = number
        return found

    def _end_of(self, peer: _StoreMember, beats: bool) -> str:
        """Return why a peer is not there any more; empty for one that is."""
        if reason := self._read("left", peer.number):
            return reason.decode()
        if not beats:
            return ""
        beat = self._store.add(self._key("beat", peer.number), 0)
        peer.silent = 0 if beat != peer.beat else peer.silent + 1
        peer.beat = beat
        if peer.silent <= BEATS:
            return ""
        silence = f"it gave no sign of life for {self._deadline_s:g} s"
        self._store.set(self._key("left", peer.number), silence)
        return silence

    def _read(self, *place: object) -> bytes | None:
        key = self._key(*place)
        return self._store.get(key) if self._store.check([key]) else None

    def _key(self, *place: object) -> str:
        return "/".join((self._prefix, *map(str, place)))

    # ---- on the event loop

    def _hand_over(self, source: _Mailbox, to: _Mailbox, data: bytes) -> bool:
        """Give a message to a member of this process, or return False while its window is full or has no session."""
        found = self._peers.get(source.channel.name)
        if found is None or found.number != source.number or to.channel.untaken(found.name) >= self._window:
            return False
        to.channel.put(found.name, data)
        return True

    def _note_busy(self) -> None:
        self._busy_until_s = monotonic() + BUSY_S

    def _find(self, peer: _StoreMember) -> None:
        self._peers[peer.name] = peer
        for name, box in self._boxes.items():
            if name != peer.name:
                box.channel.find(peer.name)

    def _lose(self, peer: _StoreMember, reason: str) -> None:
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            for box in self._boxes.values():
                box.channel.lose(peer.name, reason)

    async def _call(self, what: Callable[[], Result]) -> Result:
        finished = threading.Event()

        def call() -> Result:
            try:
                with self._lock:
                    return self._done(what)
            finally:
                finished.set()

        async with self._order:
            await anyio.lowlevel.checkpoint_if_cancelled()  # from here on the thread begins for certain
            try:
                return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
            finally:
                if not finished.is_set():
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(finished.wait, SETTLE_S, limiter=self._threads)

    def _done(self, what: Callable[[], Result]) -> Result:
        if self._failure:
            raise BrokenError(f"the store of {self._prefix} is lost: {self._failure}")
        try:
            return what()
        except Exception as error:  # each store has exceptions of its own
            self._failure = str(error) or type(error).__name__
            raise BrokenError(f"the store of {self._prefix} is lost: {self._failure}") from error
