"""Mailbox: the bounded queue in front of an actor. First in, first out; a full one makes senders wait (SV-3).

Runs on the event loop's thread. Knows nothing of actors or messages. Memory channels of trio would do for the queue,
but not for what is asked here: an item that waits can be withdrawn, and a place in line is taken without an await, so
that messages of one remote sender keep their order although a task each waits for their answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import trio

T = TypeVar("T")
Where = Literal["line", "box", "taken", "withdrawn", "refused"]


class EndOfMailbox(Exception):  # an end like EndOfChannel, not an error
    """The mailbox was sealed, and everything in it was taken."""


class MailboxPlace(Generic[T]):
    """One item's place: in line before the full box, in the box, or out of it again."""

    __slots__ = ("_mailbox", "_moved", "item", "where")

    def __init__(self, mailbox: Mailbox[T], item: T, where: Where) -> None:
        self._mailbox = mailbox
        self._moved = trio.Event()
        self.item: T = item
        self.where: Where = where
        if where != "line":
            self._moved.set()

    async def entered(self) -> None:
        """Return when the item is in the box.

        Raises:
            ActorDied: the mailbox was sealed first; the item was not delivered.

        Cancellation: leaves the item in line; `withdraw()` takes it out. Once the item is in, it is not cancelled.
        """
        if self._moved.is_set():
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._moved.wait()
        if self.where == "refused":
            raise self._mailbox.refusal()

    def withdraw(self) -> bool:
        """Take the item out again; False when it was taken, refused or withdrawn before."""
        return self._mailbox._withdraw(self)

    def _move(self, where: Where) -> None:
        self.where = where
        self._moved.set()


class Mailbox(Generic[T]):
    """A box of `capacity` items with a line of senders before it; one task takes."""

    def __init__(self, capacity: int) -> None:
        """Make an empty mailbox. Raises ValueError for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"a mailbox holds at least 1 message, got capacity {capacity}")
        self._capacity = capacity
        self._box: deque[MailboxPlace[T]] = deque()
        self._line: deque[MailboxPlace[T]] = deque()
        self._taker = trio.lowlevel.ParkingLot()
        self._refusal: Callable[[], Exception] | None = None

    def __len__(self) -> int:
        return len(self._box)

    @property
    def waiting(self) -> int:
        """How many senders wait for room."""
        return len(self._line)

    @property
    def sealed(self) -> bool:
        """Whether nothing can be put in any more."""
        return self._refusal is not None

    def refusal(self) -> Exception:
        """Return a new error that reports why nothing can be put in."""
        if self._refusal is None:
            raise RuntimeError("the mailbox is open")
        return self._refusal()

    def enter(self, item: T) -> MailboxPlace[T]:
        """Take the next place for an item: in the box when there is room, else at the end of the line.

        Raises:
            ActorDied: the mailbox is sealed.
        """
        if self._refusal is not None:
            raise self._refusal()
        # A line means that the box is full: `_fill` moves the line up whenever an item leaves.
        place = MailboxPlace(self, item, "box" if len(self._box) < self._capacity else "line")
        if place.where == "box":
            self._box.append(place)
            self._taker.unpark()
        else:
            self._line.append(place)
        return place

    async def put(self, item: T) -> MailboxPlace[T]:
        """Return when the item is in the box.

        Raises:
            ActorDied: the mailbox is sealed, or was while this waited; the item was not delivered.

        Cancellation: the item was not delivered.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        place = self.enter(item)
        try:
            await place.entered()
        except trio.Cancelled:
            place.withdraw()
            raise
        return place

    async def take(self) -> T:
        """Return the oldest item.

        Raises:
            EndOfMailbox: sealed and empty.

        Cancellation: nothing was taken.
        """
        await trio.lowlevel.checkpoint()
        while not self._box:
            if self._refusal is not None:
                raise EndOfMailbox
            await self._taker.park()
        place = self._box.popleft()
        place.where = "taken"
        self._fill()
        return place.item

    def seal(self, refusal: Callable[[], Exception]) -> list[T]:
        """Refuse new items with what `refusal` returns; what is in the box can still be taken. Returns those in line.

        The first refusal stays: the mailbox ends once.
        """
        if self._refusal is None:
            self._refusal = refusal
        refused = []
        while self._line:
            place = self._line.popleft()
            place._move("refused")
            refused.append(place.item)
        self._taker.unpark_all()
        return refused

    def empty(self) -> list[T]:
        """Take everything that is in the box, oldest first."""
        items = []
        while self._box:
            place = self._box.popleft()
            place.where = "taken"
            items.append(place.item)
        self._fill()
        return items

    def _withdraw(self, place: MailboxPlace[T]) -> bool:
        if place.where == "line":
            self._line.remove(place)
        elif place.where == "box":
            self._box.remove(place)
        else:
            return False
        place._move("withdrawn")
        self._fill()
        return True

    def _fill(self) -> None:
        while self._line and len(self._box) < self._capacity:
            place = self._line.popleft()
            self._box.append(place)
            place._move("box")
            self._taker.unpark()
