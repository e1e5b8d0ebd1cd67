"""WatchWord: a 64-bit word that a GPU kernel or another thread stores to, and whose changes tasks await.

Runs on the event loop's thread, except `store` and `value`, which any thread may use; AnyWatchWord also under the lock
of a fabric of threads. Stores through `address` or
`memory` are seen by the engine's worker as it polls; `store()` wakes it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from asyncfabric._api.checks import checked_index
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, EngineStatusError
from asyncfabric._bridge.faults import closed_meanwhile
from asyncfabric._bridge.loop_adapter import Waiter
from asyncfabric.errors import BusyError
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from types import TracebackType

    from asyncfabric._bridge.dispatcher import CompletionDispatcher

MAX_WORD = (1 << 64) - 1


class WordReaches:
    """The moment when a watch word holds a value or more: `after=` of a write. Made by `WatchWord.reaches`."""

    __slots__ = ("_value", "_word")

    def __init__(self, word: AnyWatchWord, value: int) -> None:
        """Not for users: use `WatchWord.reaches`."""
        self._word = word
        self._value = value

    def mark(self, dispatcher: CompletionDispatcher) -> int:
        """Not for users: return the mark that the engine made of it."""
        self._word._check_open()
        if self._word._dispatcher is not dispatcher:
            raise ValueError(f"{self!r} is a word of another fabric: its engine would not look at it")
        return dispatcher.engine.mark_word(self._word._id, self._value)

    def __repr__(self) -> str:
        return f"<{self._word!r} reaches {self._value}>"


class AnyWatchWord:
    """What a watched word does, however its changes are waited for. It begins at 0."""

    __slots__ = ("_address", "_closed", "_cookie", "_dispatcher", "_id", "_seen", "_waiter")

    def __init__(self, dispatcher: CompletionDispatcher) -> None:
        """Not for users: use `fabric.watch()`."""
        self._dispatcher = dispatcher
        self._id = 0
        self._address = 0
        self._cookie = dispatcher.next_cookie()
        self._seen = 0
        self._waiter: Waiter | None = None
        self._closed = True

    def _open(self) -> None:
        self._dispatcher.check_loop()
        if self._dispatcher.closing or self._id:
            raise faults.closed("the fabric" if self._dispatcher.closing else repr(self))
        try:
            self._id, self._address = self._dispatcher.engine.open_watch()
        except EngineStatusError as error:
            raise faults.watch_refused(error) from None
        self._closed = False

    def _close(self) -> None:
        self._dispatcher.check_loop()
        self._closed = True
        self._dispatcher.parked.pop(self._cookie, None)
        if not self._dispatcher.closed:
            self._dispatcher.engine.close_watch(self._id)
        self.abandon()

    @property
    def address(self) -> int:
        """Address of the 8 bytes, for kernels and foreign code; valid inside the `async with`."""
        self._check_open()
        return self._address

    @property
    def memory(self) -> memoryview:
        """The word as a memoryview of one native unsigned 64-bit integer; valid inside the `async with`."""
        self._check_open()
        word = (ctypes.c_uint64 * 1).from_address(self._address)
        return memoryview(word).cast("B").cast("Q")

    @property
    def value(self) -> int:
        """What the word holds now."""
        self._check_open()
        with closed_meanwhile(self):
            return self._dispatcher.engine.watch_load(self._id)

    def store(self, value: int) -> None:
        """Store a value and wake the engine, so that waiting tasks see it at once; any thread."""
        self._check_open()
        number = checked_index("value", value, 0, MAX_WORD)
        with closed_meanwhile(self):
            self._dispatcher.engine.watch_store(self._id, number)

    def reaches(self, value: int) -> WordReaches:
        """Return the moment when the word holds `value` or more, for `fabric.write(..., after=...)`.

        The write leaves then without waking this process's event loop: the engine's worker looks at the word, and spins
        while a write waits for one. When the word is closed first, the write ends with ClosedError.

        Raises:
            TypeError, ValueError: no unsigned 64-bit integer.
            ClosedError: the word or the fabric is closed.
        """
        self._dispatcher.check_thread()
        self._check_open()
        return WordReaches(self, checked_index("value", value, 0, MAX_WORD))

    def complete(self, completion: Completion) -> None:
        """The engine reports that the word changed."""
        if self._waiter is not None:
            self._dispatcher.adapter.wake(self._waiter)
        self._waiter = None
        self._dispatcher.parked.pop(self._cookie, None)

    def abandon(self) -> None:
        """Wake the task that waits, to find the word closed."""
        if self._waiter is not None:
            self._waiter.error = faults.closed(repr(self))
            self._dispatcher.adapter.wake(self._waiter)
        self._waiter = None

    def waiting(self) -> list[Waiting]:
        """Return the line of the waiting task, if there is one."""
        waiter = self._waiter
        if waiter is None:
            return []
        return [Waiting(f"{self!r}", "another value than it had", self._seen, self._seen, since=waiter.since)]

    async def _next(self) -> tuple[int, int]:
        dispatcher = self._dispatcher
        dispatcher.check_loop()
        self._check_open()
        if self._waiter is not None:
            raise BusyError(f"another task waits for {self!r}", remedy="give each task a word of its own")
        old = self._seen
        new = dispatcher.engine.watch_load(self._id)
        if new != old:
            await dispatcher.checkpoint()
        else:
            while new == old:  # a word may change and change back
                await self._changed(old)
                new = dispatcher.engine.watch_load(self._id)
        self._seen = new
        return old, new

    async def _changed(self, seen: int) -> None:
        dispatcher = self._dispatcher
        waiter = self._waiter = Waiter()
        dispatcher.parked[self._cookie] = self
        try:
            dispatcher.engine.arm_watch(self._id, self._cookie, seen)
            await dispatcher.adapter.wait(waiter)
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"waiting for {self!r}")) from None
        finally:
            if self._waiter is waiter:
                self._waiter = None
        if waiter.error is not None:
            raise waiter.error

    def _check_open(self) -> None:
        if self._closed or self._dispatcher.closed:
            raise faults.closed(repr(self))

    def __repr__(self) -> str:
        return f"<WatchWord {faults.short_id(self._id)}>"


class WatchWord(AnyWatchWord):
    """A watched word, used as `async with fabric.watch() as word`. It begins at 0.

    `async for old, new in word` yields its changes to one task at a time. Changes are coalesced: `old` is what was
    yielded last, `new` is what the word holds now, and equal values are not yielded. Writers are expected to count up.
    """

    __slots__ = ()

    async def __aenter__(self) -> WatchWord:
        """Open the word.

        Raises:
            BusyError: MAX_WATCH_WORDS words of this fabric are open.
            ClosedError: the fabric is closed.

        Cancellation: does not wait.
        """
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the word; the writers must have stopped, since its memory is used again.

        Cancellation: does not wait.
        """
        self._close()

    def __aiter__(self) -> WatchWord:
        return self

    async def __anext__(self) -> tuple[int, int]:
        """Return (old, new) once the word differs from what was returned last.

        Raises:
            BusyError: another task iterates over the word.
            ClosedError: the word or the fabric is closed.

        Cancellation: nothing is lost; the next call returns the change.
        """
        return await self._next()
