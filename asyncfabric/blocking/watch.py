"""WatchWord of a blocking fabric: a 64-bit word that kernels and threads store to; one thread waits for its changes.

Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncfabric._api.watch import AnyWatchWord
from asyncfabric.blocking.deadlines import until

if TYPE_CHECKING:
    from types import TracebackType

    from asyncfabric._bridge.threads import ThreadDispatcher


class WatchWord(AnyWatchWord):
    """A watched word, used as `with fabric.watch() as word`. It begins at 0.

    `for old, new in word` yields its changes to one thread at a time. Changes are coalesced: `old` is what was yielded
    last, `new` is what the word holds now, and equal values are not yielded. Writers are expected to count up.
    """

    __slots__ = ()

    _dispatcher: ThreadDispatcher

    def wait(self, deadline: float | None = None) -> tuple[int, int]:
        """Block until the word differs from what was returned last, and return (old, new).

        Args:
            deadline: seconds from now; None waits as long as it takes.

        Raises:
            TimeoutError: it did not change by then; the next call returns the change.
            BusyError: another thread waits for the word.
            ClosedError: the word or the fabric is closed, also when that happens during the wait.
        """
        limit = until(deadline)
        try:
            return self._dispatcher.run(self._next(), limit)
        except TimeoutError:
            raise TimeoutError(f"{self!r} did not change within {deadline:g} s") from None

    def __enter__(self) -> WatchWord:
        """Open the word.

        Raises:
            BusyError: MAX_WATCH_WORDS words of this fabric are open.
            ClosedError: the fabric is closed.
        """
        with self._dispatcher.lock:
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the word; the writers must have stopped, since its memory is used again."""
        with self._dispatcher.lock:
            self._close()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (old, new) each time the word changed."""
        while True:
            yield self.wait()
