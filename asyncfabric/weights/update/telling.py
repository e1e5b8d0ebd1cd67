"""Telling: receivers hear which rows are written or will be, in a handful of words from each sender for all its units.

A word costs its two event loops a tenth of a millisecond and more, so hundreds of senders must not tell each unit to
each receiver. A word is due when what was written since the last one is worth checking, see `Share`; what waits
otherwise goes along, and nothing waits for long. Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic

import anyio
import numpy as np

from asyncfabric._notice import Notice
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.shares import Share, begin_of
from asyncfabric.weights.update.messages import MOST_ROWS, Written
from asyncfabric.weights.update.runs import Gate
from asyncfabric.weights.update.threads import ways

FEW_CORES_TELL_S, TELL_S = 0.005, 0.001
"""A word that is due leaves so much later: what is written meanwhile goes along. Where cores are few a word takes time
from what is checked meanwhile."""

LATEST_S, LATEST_PART = 0.25, 8
"""What was written is told after so long at the latest, or after this part of the sending so far, if that is longer:
receivers check and forward meanwhile what they know of."""

Tell = Callable[[str, list[int], list[int], int], Awaitable[None]]


def shares_of(gates: Mapping[str, Gate], coming_bytes: Mapping[str, int]) -> Callable[[str], Share | None]:
    """Return what says the share of a receiver in what one sender writes through these gates.

    The counters of a receiver's senders are different numbers, so their first words are spread evenly.
    """

    def share_of(receiver: str) -> Share | None:
        gate = gates.get(receiver)
        return None if gate is None else Share(coming_bytes[receiver], gate.share_bytes, begin_of(gate.imm))

    return share_of


@dataclass(slots=True)
class _Untold:
    """Rows for one receiver: since when, and after which arrival there all of them are."""

    since: float
    rows: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    after: int = 0


class Teller:
    """What is written and not told yet, by receiver."""

    def __init__(self, tell: Tell, share_of: Callable[[str], Share | None] | None = None) -> None:
        """`tell` gets (receiver, rows, checksums, after which arrival); who has no share hears of each unit."""
        self._tell = tell
        self._share_of = share_of
        self._shares: dict[str, Share] = {}
        self._untold: dict[str, _Untold] = {}
        self._due: set[str] = set()
        self._added = Notice()
        self._last = anyio.Event()
        self._begin = monotonic()

    def add(self, receiver: str, row: int, checksum: int, row_bytes: int = 0, after: int = 0) -> None:
        """Note that a row is written, or that it will be among the first `after` arrivals there, which only grow."""
        untold = self._untold.get(receiver)
        if untold is None:
            untold = self._untold[receiver] = _Untold(monotonic())
            self._added.tell()
        untold.rows.append(row)
        untold.sums.append(checksum)
        untold.after = after
        share = self._shares.get(receiver)
        if share is None and self._share_of is not None and (share := self._share_of(receiver)) is not None:
            self._shares[receiver] = share
        if (share is None or share.add(row_bytes)) and receiver not in self._due:
            self._due.add(receiver)
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
            elif not self._due and not self._last.is_set():
                with anyio.move_on_after(LATEST_S / 4):
                    await self._added.wait()
            if not self._last.is_set() and self._due:
                with anyio.move_on_after(TELL_S if ways() > 1 else FEW_CORES_TELL_S):
                    await self._last.wait()
            for receiver in self._ready():
                untold = self._untold.pop(receiver)
                self._due.discard(receiver)
                if (share := self._shares.get(receiver)) is not None:
                    share.told()
                await self._tell(receiver, untold.rows, untold.sums, untold.after)

    def _ready(self) -> list[str]:
        """Return who is to hear now."""
        if self._last.is_set():
            return list(self._untold)
        now = monotonic()
        latest = now - max(LATEST_S, (now - self._begin) / LATEST_PART)
        return [name for name, untold in self._untold.items() if name in self._due or untold.since < latest]


def rows_told(
    version: int, rows: list[int], sums: list[int], kind: ChecksumKind, after: int = 0
) -> Iterator[Written]:  # fmt: skip
    """Yield the messages that say that these rows are written, or will be with so many arrivals."""
    for low in range(0, len(rows), MOST_ROWS):
        part = slice(low, low + MOST_ROWS)
        columns = np.array(rows[part], "<i8").tobytes(), np.array(sums[part], "<u8").tobytes()
        yield Written(version, *columns, kind, after)
