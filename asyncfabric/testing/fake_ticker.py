"""The only thread of a fake engine: looks at armed watch words and at drain deadlines, and ends when there are none.

A native engine's worker does this in its step. Nothing else of the fake needs time to pass, so most tests never start
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PERIOD_S = 0.001


class Ticker:
    """Call `tick` each millisecond while it returns True. `tick` takes the lock itself."""

    def __init__(self, tick: Callable[[], bool]) -> None:
        self._tick = tick
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = False

    def start(self) -> None:
        """Run unless it runs already."""
        with self._guard:
            self._wanted = True
            if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._run, name="asyncfabric-fake-ticker", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop and join; idempotent. Not to be called under the lock that `tick` takes."""
        self._stop.set()
        with self._guard:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            with self._guard:
                self._wanted = False
            if self._tick():
                continue
            with self._guard:  # a start() between the tick and here must not be lost
                if not self._wanted:
                    self._thread = None
                    return
