"""Reads of one object under way, and the request that Ray waits for.

Any thread. A fetch that ended, was aborted or was dropped lets its memory go only when nothing writes into it any more
(INV-2). Finalizers of Python may run in any thread between any two lines, also in one that holds a lock of the fabric:
a dropped request only leaves its reads in a queue, and the next call of the transport collects them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock

from asyncfabric.blocking import Transfer, wait_all
from asyncfabric.integrations.ray.interface import FetchRequest


class Reads:
    """The reads of one fetch, and what has to be let go when they have ended."""

    def __init__(self, obj_id: str, source: str) -> None:
        """Not for users."""
        self.obj_id = obj_id
        self.source = source
        self.transfers: list[Transfer] = []
        self.holds: ExitStack[bool | None] = ExitStack()
        self.aborted: bool = False
        self.ended: bool = False

    def add(self, transfer: Transfer) -> None:
        """Take one more read; an abort that came meanwhile counts for it too."""
        self.transfers.append(transfer)
        if self.aborted:
            transfer.cancel()

    def cancel(self) -> None:
        """Stop posting what is not posted; what is posted drains."""
        self.aborted = True
        for transfer in list(self.transfers):
            transfer.cancel()

    def wait(self, deadline: float | None) -> None:
        """Block until all have ended, then let their memory go.

        Raises:
            TimeoutError: some have not ended after `deadline` seconds; they go on.
            TransferError, PeerError, StaleKeyError: the first failure, when all have ended.
        """
        try:
            wait_all(self.transfers, deadline)
        except TimeoutError:
            raise
        except Exception:
            self.end()
            raise
        self.end()

    def end(self) -> None:
        """Let the memory go; every read has ended."""
        self.ended = True
        self.holds.close()

    def progress(self) -> str:
        """Return how much has arrived, for error texts."""
        done = sum(transfer.bytes for transfer in self.transfers)
        return f"{done} of {sum(transfer.total_bytes for transfer in self.transfers)} bytes had arrived"


@dataclass
class RayFetch(FetchRequest):
    """A fetch that Ray waits for. Dropped before it has ended, it is cancelled."""

    reads: Reads | None = None
    dropped: SimpleQueue[Reads] | None = field(default=None, repr=False)

    def __del__(self) -> None:
        if self.dropped is not None and self.reads is not None and not self.reads.ended:
            self.dropped.put(self.reads)


class FetchesUnderWay:
    """Every fetch of a process that has not ended, by the object that it reads, and those that were dropped."""

    _REMEMBERED = 1024

    def __init__(self) -> None:
        """Empty."""
        self.dropped: SimpleQueue[Reads] = SimpleQueue()
        self._lock = Lock()
        self._open: dict[str, list[Reads]] = {}
        self._aborted: dict[str, None] = {}
        self._draining: list[Reads] = []

    def begin(self, obj_id: str, source: str) -> Reads | None:
        """Return the reads of a new fetch; None if it was aborted before it began."""
        self.collect()
        with self._lock:
            if obj_id in self._aborted:
                del self._aborted[obj_id]
                return None
            reads = Reads(obj_id, source)
            reads.holds.callback(self._close, reads)
            self._open.setdefault(obj_id, []).append(reads)
            return reads

    def abort(self, obj_id: str) -> None:
        """Cancel the fetches of an object; with none under way the next one does not begin."""
        with self._lock:
            found = list(self._open.get(obj_id, ()))
            if not found:
                self._aborted[obj_id] = None
                while len(self._aborted) > self._REMEMBERED:
                    del self._aborted[next(iter(self._aborted))]
        for reads in found:
            reads.cancel()

    def collect(self) -> None:
        """Cancel what was dropped and let the memory of those go that have drained; never waits for a peer."""
        fresh: list[Reads] = []
        while True:
            try:
                fresh.append(self.dropped.get_nowait())
            except Empty:
                break
        for reads in fresh:
            reads.cancel()
        with self._lock:
            waiting, self._draining = [*self._draining, *fresh], []
        for reads in waiting:
            if all(transfer.done for transfer in reads.transfers):
                reads.end()
            else:
                with self._lock:
                    self._draining.append(reads)

    def reads(self) -> list[Reads]:
        """Return the fetches that have not ended, or whose memory is not let go yet."""
        with self._lock:
            return [reads for several in self._open.values() for reads in several]

    def _close(self, reads: Reads) -> None:
        with self._lock:
            others = [other for other in self._open.get(reads.obj_id, ()) if other is not reads]
            if others:
                self._open[reads.obj_id] = others
            else:
                self._open.pop(reads.obj_id, None)
