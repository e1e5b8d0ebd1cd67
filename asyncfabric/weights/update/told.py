"""Told: which rows of one version were said to be written at one receiver, and by whom they may be.

Runs on the event loop's thread. What many senders say together is looked up once for all, in arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncfabric import RemoteProtocolError
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.update.messages import Written


class Columns(NamedTuple):
    """Rows, their checksums, and which of the receiver's rows they are."""

    rows: Ints
    sums: NDArray[np.uint64]
    at: Ints
    kind: ChecksumKind

    def cut(self, row_bytes: Ints, most_bytes: int) -> Iterator[Columns]:
        """Yield them in order, whole rows, in pieces of less than `most_bytes` besides the first row of each.

        `row_bytes` is of each row.
        """
        numbers = (np.cumsum(row_bytes) - 1) // most_bytes
        begins = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(self.rows)]
        for low, high in pairwise(begins):
            if low != high:
                part = slice(low, high)
                yield Columns(self.rows[part], self.sums[part], self.at[part], self.kind)


class Told:
    """What was told of one version.

    Attributes:
        all: whether that is everything.
    """

    def __init__(self, rows: Ints, senders: Ints, names: Mapping[str, int]) -> None:
        """Await these rows, in ascending order; `senders` has the number of each one's, `names` those of the names."""
        self._rows = rows
        self._senders = senders
        self._names = names
        self._told = np.zeros(len(rows), bool)
        self.all: bool = not len(rows)

    def take(self, words: Sequence[tuple[str, Written]]) -> Iterator[Columns]:
        """Note what was said together; yields it by the kind of its checksums.

        Raises RemoteProtocolError for rows that are not their sender's to write here, or that were told before; the
        rest of what came with them is not noted then, the version is over.
        """
        by_kind: dict[ChecksumKind, list[tuple[str, Written]]] = {}
        for sender, message in words:
            if len(message.rows) != len(message.sums) or len(message.rows) % 8:
                _refuse(sender, message.version)
            by_kind.setdefault(message.checksum, []).append((sender, message))
        for kind, alike in by_kind.items():
            rows = np.frombuffer(b"".join(message.rows for _, message in alike), "<i8")
            sums = np.frombuffer(b"".join(message.sums for _, message in alike), "<u8")
            lengths = [len(message.rows) // 8 for _, message in alike]
            numbers = np.repeat([self._names.get(sender, -1) for sender, _ in alike], lengths)
            at = self._found(rows, numbers)
            if at is None:
                for sender, message in alike:
                    self.check(sender, message.version, np.frombuffer(message.rows, "<i8"))
                _refuse(" and ".join(dict.fromkeys(sender for sender, _ in alike)), alike[0][1].version)
            else:
                self._note(at)
                yield Columns(rows, sums, at, kind)

    def check(self, sender: str, version: int, rows: Ints) -> None:
        """Look whether these rows are a sender's to write, without noting them.

        Raises RemoteProtocolError as `take` does.
        """
        if self._found(rows, self._names.get(sender, -1)) is None:
            _refuse(sender, version)

    def _found(self, rows: Ints, numbers: Ints | int) -> Ints | None:
        """Return where rows stand; None unless each is its sender's and comes once, now for the first time."""
        at = np.searchsorted(self._rows, rows)
        if len(at) and int(at.max()) >= len(self._rows):
            return None
        fine = (self._rows[at] == rows) & (self._senders[at] == numbers) & ~self._told[at]
        return at if bool(fine.all()) and len(np.unique(at)) == len(at) else None

    def _note(self, at: Ints) -> None:
        self._told[at] = True
        self.all = bool(self._told.all())


def _refuse(sender: str, version: int) -> NoReturn:
    raise RemoteProtocolError(f"{sender} says that it wrote rows of version {version} that are not its")
