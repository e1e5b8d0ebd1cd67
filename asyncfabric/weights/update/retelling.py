"""Retelling: who gets rows from a receiver that forwards hears of them as of a trainer's, in words worth a share.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from anyio.abc import TaskGroup

from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.shares import Share
from asyncfabric.weights.update.telling import Tell, Teller, rows_told
from asyncfabric.weights.update.words import Words


class Retelling:
    """What one receiver says of one version that it passes on."""

    def __init__(self, version: int, words: Words) -> None:
        """Say it with these words."""
        self._version = version
        self._words = words
        self._tellers: dict[ChecksumKind, Teller] = {}  # each trainer's checksums travel along, of its kind
        self._tasks: TaskGroup | None = None
        self._share_of: Callable[[str], Share | None] | None = None

    def begin(self, tasks: TaskGroup, share_of: Callable[[str], Share | None]) -> None:
        """Tell by tasks of this group, which ends after `finish`."""
        self._tasks = tasks
        self._share_of = share_of

    def add(self, receiver: str, rows: list[int], sums: list[int], sizes: list[int], kind: ChecksumKind) -> None:
        """Note rows of a receiver that are written, their checksums and bytes."""
        teller = self._tellers.get(kind)
        if teller is None:
            assert self._tasks is not None
            teller = self._tellers[kind] = Teller(self._tell_of(kind), self._share_of)
            self._tasks.start_soon(teller.run)
        for row, checksum, size in zip(rows, sums, sizes, strict=True):
            teller.add(receiver, row, checksum, size)

    def finish(self) -> None:
        """Say that everything is passed on: what is left is told at once."""
        for teller in self._tellers.values():
            teller.finish()

    def _tell_of(self, kind: ChecksumKind) -> Tell:
        async def tell(receiver: str, rows: list[int], sums: list[int], after: int) -> None:
            for message in rows_told(self._version, rows, sums, kind, after):
                self._words.say(receiver, message)

        return tell
