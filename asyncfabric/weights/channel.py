"""Channel: carries the messages of one participant; the names of participants; the channel within one process.

Runs on the event loop's thread. Links or actors implement it in services. Messages of one session keep their order, and
none arrives after its session has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from anyio.lowlevel import checkpoint

from asyncfabric._notice import Notice
from asyncfabric.errors import ClosedError, PeerError
from asyncfabric.weights.messages import WeightMessage, decode_message, encode_message

Item = TypeVar("Item")


class Queue(Generic[Item]):
    """Items in order. anyio's streams want to be closed at both ends; a queue may simply be forgotten."""

    def __init__(self, room: int = 0) -> None:
        """Hold any number of items, or `room` of them."""
        self._items: deque[Item] = deque()
        self._room = room
        self._closed = False
        self._changed = Notice()

    def put_nowait(self, item: Item) -> None:
        """Add an item, whether there is room or not; nobody takes what is added after `close()`."""
        if not self._closed:
            self._items.append(item)
            self._changed.tell()

    async def put(self, item: Item) -> None:
        """Add an item once there is room.

        Cancellation: it was not added.
        """
        await checkpoint()
        while self._room and len(self._items) >= self._room:
            await self._changed.wait()
        self.put_nowait(item)

    def take_nowait(self) -> list[Item]:
        """Return everything that is in the queue now, perhaps nothing."""
        items = list(self._items)
        if items:
            self._items.clear()
            self._changed.tell()
        return items

    def next_nowait(self) -> Item | None:
        """Return the next item if there is one now."""
        if not self._items:
            return None
        item = self._items.popleft()
        self._changed.tell()
        return item

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Say that nothing more will come."""
        self._closed = True
        self._changed.tell()

    def __aiter__(self) -> Queue[Item]:
        return self

    async def __anext__(self) -> Item:
        """Return the next item; ends when the queue is closed and empty.

        Cancellation: nothing is lost.
        """
        await checkpoint()
        while (item := self.next_nowait()) is None:
            if self._closed:
                raise StopAsyncIteration
            await self._changed.wait()
        return item


COORDINATOR = "coordinator"

AGAIN_S = 0.05
"""A message of a version to a participant without a session is sent again after so long, while the version is open:
participants that have just begun find the coordinator first, and each other later."""


def trainer_name(rank: int) -> str:
    """Return what a trainer is called in messages."""
    return f"trainer-{rank}"


def receiver_name(replica: str, receiver: int) -> str:
    """Return what a receiver of a replica is called in messages."""
    return f"{replica}/{receiver}"


def receiver_of(name: str) -> tuple[str, int]:
    """Return (replica, receiver) of a receiver's name; raises ValueError for other names and other spellings."""
    replica, _, receiver = name.rpartition("/")
    if not (replica and receiver.isdecimal() and receiver_name(replica, int(receiver[:9])) == name):
        raise ValueError(f"{name[:80]!a} is no receiver's name, which is replica/number")
    return replica, int(receiver)


@dataclass(frozen=True, slots=True)
class Found:
    """A session with a participant begins."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The session with a participant has ended."""

    reason: str


Event = WeightMessage | Found | Lost


Send = Callable[[str, WeightMessage], Awaitable[None]]
"""Sends a message to a participant, for one of a version: a message that cannot be sent is logged, not raised."""


class Messenger(Protocol):
    """Carries messages of one participant. Everybody has a session with the coordinator while both live.

    Sessions among the others may begin with the first message; Found and Lost of those are not needed.
    """

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message.

        Raises:
            PeerError: there is no session with `to`, or none yet.

        Cancellation: the message may or may not have left.
        """

    async def receive(self) -> tuple[str, Event]:
        """Return what comes next, and from whom.

        Raises:
            ClosedError: there will be no more.

        Cancellation: nothing is lost.
        """

    def take_nowait(self) -> list[tuple[str, Event]]:
        """Return what is there already, in order, perhaps nothing: it is taken together, with one wake-up."""


class LocalPost:
    """Messengers of one process and one event loop, for tests and for examples. Messages go through their coding."""

    def __init__(self) -> None:
        self._boxes: dict[str, LocalMessenger] = {}

    def open(self, name: str) -> LocalMessenger:
        """Return the messenger of a participant, with sessions to all who are there.

        Raises ValueError for a name that is taken.
        """
        if name in self._boxes:
            raise ValueError(f"{name!r} is there already")
        mine = LocalMessenger(self, name)
        for other, box in self._boxes.items():
            box.put(name, Found())
            mine.put(other, Found())
        self._boxes[name] = mine
        return mine

    def close(self, name: str, reason: str = "it was closed") -> None:
        """End a participant: everybody loses it."""
        gone = self._boxes.pop(name)
        gone.end()
        for box in self._boxes.values():
            box.put(name, Lost(reason))

    def renew(self, one: str, other: str, reason: str = "the link broke") -> None:
        """Break the session of two participants and begin a new one at once."""
        for name, peer in ((one, other), (other, one)):
            self._boxes[name].put(peer, Lost(reason))
            self._boxes[name].put(peer, Found())

    def deliver(self, sender: str, to: str, data: bytes) -> None:
        """Put a message into a box; raises PeerError when there is none."""
        if to not in self._boxes:
            raise PeerError(f"{to} is not there", remedy="is its process alive?")
        self._boxes[to].put(sender, decode_message(data))


class LocalMessenger:
    """A messenger of a LocalPost; made by `post.open(name)`."""

    def __init__(self, post: LocalPost, name: str) -> None:
        """Not for users."""
        self.name: str = name
        self._post = post
        self._queue: Queue[tuple[str, Event]] = Queue()

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message; see Messenger.

        Cancellation: the message did not leave.
        """
        await checkpoint()
        self._post.deliver(self.name, to, encode_message(message))

    async def receive(self) -> tuple[str, Event]:
        """Return what comes next; see Messenger.

        Cancellation: nothing is lost.
        """
        try:
            return await anext(self._queue)
        except StopAsyncIteration:
            raise ClosedError(f"the messenger of {self.name} is closed") from None

    def take_nowait(self) -> list[tuple[str, Event]]:
        """Return what is there already."""
        return self._queue.take_nowait()

    def put(self, sender: str, event: Event) -> None:
        """Add to what is received; a closed messenger drops it."""
        self._queue.put_nowait((sender, event))

    def end(self) -> None:
        """Say that nothing more will come."""
        self._queue.close()
