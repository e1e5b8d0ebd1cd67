"""Telling: receivers hear which rows are written, in a handful of words from each sender, however many units it has.

A word costs its two event loops a tenth of a millisecond and more, so hundreds of senders must not tell each unit to
each receiver. A word is due when what was written since the last one is worth checking, see `Share`; what waits
otherwise goes along, and nothing waits for long. Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from time import monotonic

import anyio
import numpy as np

from asyncfabric._notice import Notice
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.update.messages import MOST_ROWS, Written
from asyncfabric.weights.update.runs import Gate

TELL_S = 0.005
"""A word that is due leaves so much later: what is written meanwhile goes along."""

LATEST_S, LATEST_PART = 0.1, 8
"""What was written is told after so long at the latest, or after this part of the sending so far, if that is longer:
receivers check and forward meanwhile what they know of."""

SHARES = 512
"""A receiver asks for words worth this part of all that it awaits: they then cost its event loop some 50 ms, whoever
sends, and what is still to be checked at the end is little."""

LEAST_PART = 8
"""Towards the end words are worth less, down to this part of a share, so that the last checks are short."""

Tell = Callable[[str, list[int], list[int]], Awaitable[None]]


class Share:
    """When what one sender has written for one receiver is worth a word.

    It is worth one when it makes up a share; or at least a part of one, and half of what the receiver did not hear of.
    """

    __slots__ = ("_coming", "_least", "_share", "_untold", "_worth")

    def __init__(self, coming_bytes: int, share_bytes: int, begin: float = 1.0) -> None:
        """Look forward to so many bytes.

        Args:
            coming_bytes: of everything for this receiver.
            share_bytes: as it asked for; 0: it wants to hear of each unit.
            begin: part of a share that is worth the first word; senders who begin at different ones tell in turn.
        """
        self._coming = coming_bytes
        self._share = share_bytes
        self._least = share_bytes // LEAST_PART
        self._worth = share_bytes * begin
        self._untold = 0

    def add(self, written_bytes: int) -> bool:
        """Note what was written; return whether a word is due, which then is told."""
        self._coming -= written_bytes
        self._untold += written_bytes
        if self._untold < self._worth and self._untold < max(self._least, self._coming):
            return False
        self.told()
        self._worth = self._share
        return True

    def told(self) -> None:
        """A word was told, due or not."""
        self._untold = 0


def shares_of(gates: Mapping[str, Gate], coming_bytes: Mapping[str, int]) -> dict[str, Share]:
    """Return the shares of what one sender writes through these gates.

    The counters of a receiver's senders are different numbers, so a hash of them spreads the first words evenly.
    """
    return {
        name: Share(coming_bytes[name], gate.share_bytes, ((gate.imm + 1) * 0x9E3779B1 & 0xFFFFFFFF) / (1 << 32))
        for name, gate in gates.items()
    }


class Teller:
    """What is written and not told yet, by receiver."""

    def __init__(self, tell: Tell, shares: Mapping[str, Share] | None = None) -> None:
        """`tell` is called with (receiver, rows, checksums); who has no share hears of each unit."""
        self._tell = tell
        self._shares = shares or {}
        self._untold: dict[str, tuple[list[int], list[int], float]] = {}
        self._due: set[str] = set()
        self._added = Notice()
        self._last = anyio.Event()
        self._begin = monotonic()

    def add(self, receiver: str, row: int, checksum: int, row_bytes: int = 0) -> None:
        """Note that a row is written."""
        untold = self._untold.get(receiver)
        if untold is None:
            untold = self._untold[receiver] = ([], [], monotonic())
            self._added.tell()
        untold[0].append(row)
        untold[1].append(checksum)
        share = self._shares.get(receiver)
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
                with anyio.move_on_after(TELL_S):
                    await self._last.wait()
            for receiver in self._ready():
                rows, sums, _ = self._untold.pop(receiver)
                self._due.discard(receiver)
                if (share := self._shares.get(receiver)) is not None:
                    share.told()
                await self._tell(receiver, rows, sums)

    def _ready(self) -> list[str]:
        """Return who is to hear now."""
        if self._last.is_set():
            return list(self._untold)
        now = monotonic()
        latest = now - max(LATEST_S, (now - self._begin) / LATEST_PART)
        return [name for name, (_, _, since) in self._untold.items() if name in self._due or since < latest]


def rows_told(version: int, rows: list[int], sums: list[int], kind: ChecksumKind) -> Iterator[Written]:
    """Yield the messages that say that these rows are written."""
    for low in range(0, len(rows), MOST_ROWS):
        part = slice(low, low + MOST_ROWS)
        yield Written(version, np.array(rows[part], "<i8").tobytes(), np.array(sums[part], "<u8").tobytes(), kind)
