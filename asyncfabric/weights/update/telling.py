"""Telling: receivers hear which rows are written, in messages of bounded size, and not for every unit anew.

A word costs its two event loops a millisecond between busy processes, as much as hashing 16 MiB: so what was written
meanwhile goes along. Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
import numpy as np

from asyncfabric._notice import Notice
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.update.messages import MOST_ROWS, Written
from asyncfabric.weights.update.threads import ways

FEW_CORES_TELL_S, TELL_S = 0.005, 0.001
"""What was written is told so much later at most; receivers check and forward meanwhile what they know of. Where cores
are few a word takes time from what is checked meanwhile."""

Tell = Callable[[str, list[int], list[int]], Awaitable[None]]


class Teller:
    """What is written and not told yet, by receiver."""

    def __init__(self, tell: Tell) -> None:
        """`tell` is called with (receiver, rows, checksums)."""
        self._tell = tell
        self._untold: dict[str, tuple[list[int], list[int]]] = {}
        self._added = Notice()
        self._last = anyio.Event()

    def add(self, receiver: str, row: int, checksum: int) -> None:
        """Note that a row is written."""
        rows, sums = self._untold.setdefault(receiver, ([], []))
        rows.append(row)
        sums.append(checksum)
        self._added.tell()

    def finish(self) -> None:
        """Say that nothing more will be added: what is left is told at once."""
        self._last.set()
        self._added.tell()

    async def run(self) -> None:
        """Tell until `finish`.

        Cancellation: what was not told is not told.
        """
        while self._untold or not self._last.is_set():
            if not self._untold:
                await self._added.wait()
            with anyio.move_on_after(TELL_S if ways() > 1 else FEW_CORES_TELL_S):
                await self._last.wait()
            untold, self._untold = self._untold, {}
            for receiver, (rows, sums) in untold.items():
                await self._tell(receiver, rows, sums)


def rows_told(version: int, rows: list[int], sums: list[int], kind: ChecksumKind) -> Iterator[Written]:
    """Yield the messages that say that these rows are written."""
    for low in range(0, len(rows), MOST_ROWS):
        part = slice(low, low + MOST_ROWS)
        yield Written(version, np.array(rows[part], "<i8").tobytes(), np.array(sums[part], "<u8").tobytes(), kind)
