"""Writing: runs of rows written to a receiver, waiting for transfers, and the reports of rows that are written.

Runs on the event loop's thread. A report costs its two event loops a tenth of a millisecond and more, so hundreds of
senders must not report each unit to each receiver. A report is due when the rows since the last one are worth
checking, see `ReportShare`; other waiting rows go along, and none waits for long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import anyio
import numpy as np

from asyncfabric import Fabric, FabricError, Region, RegionKey, Transfer
from asyncfabric._notice import Notice
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.messages import MOST_ROWS, Keys, Opened, Written
from asyncfabric.weights.plan.batch import ReportShare, begin_of
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.threads import ways

MOST_PAGES = 32768
"""Pages of one call."""

LONG_RUN_BYTES = 8 << 20
"""Runs from here on are written one by one: a call is nothing beside them, and rails may split them."""


class KeyedMemory:
    """The memory of a receiver as others reach it.

    Attributes:
        begins: the byte of its layout that each key begins at, ascending.
        keys: what lies in one piece there has one of its own.
    """

    def __init__(self, keys: Keys) -> None:
        """Take what a receiver sent; raises ValueError for what is no key."""
        self.begins: Ints = np.array([begin for begin, _ in keys], np.int64)
        self.keys: list[RegionKey] = [RegionKey.from_bytes(key) for _, key in keys]

    def split(self, targets: Ints) -> Iterator[tuple[RegionKey, Ints, Ints]]:
        """Yield each key that bytes of the layout are behind, which of `targets` these are, and how far behind it."""
        if len(self.keys) == 1:
            yield self.keys[0], np.arange(len(targets)), targets - self.begins[0]
            return
        which = np.maximum(np.searchsorted(self.begins, targets, "right") - 1, 0)
        order = np.argsort(which, kind="stable")
        for at in np.split(order, np.flatnonzero(np.diff(which[order])) + 1) if len(targets) else ():
            number = int(which[at[0]])
            yield self.keys[number], at, targets[at] - self.begins[number]


@dataclass(frozen=True, slots=True)
class Gate:
    """Where a receiver wants a version: its keys, the counter for what this sender writes, the bytes worth a report."""

    memory: KeyedMemory
    imm: int
    share_bytes: int = 0


def gate_of(opened: Opened) -> Gate:
    """Return what a receiver opened; raises ValueError for what is no key."""
    return Gate(KeyedMemory(opened.keys), opened.imm, opened.share_bytes)


def write_runs(
    fabric: Fabric,
    region: Region,
    sources: Ints,
    key: RegionKey,
    targets: Ints,
    run_bytes: int,
    imm: int,
    after: object = None,
) -> Transfer:
    """Write runs from byte offsets of a region to byte offsets behind a key; each counts one arrival on `imm`.

    `after` is a stream of the region's GPU that the bytes are read after.

    Runs of LONG_RUN_BYTES and more come one at a time. Raises what `Fabric.write_pages` raises.
    """
    if len(sources) == 1:
        begin = int(sources[0])
        return fabric.write(region[begin : begin + run_bytes], key, int(targets[0]), imm, after=after)
    return fabric.write_pages(
        region,
        sources,
        key,
        targets,
        page_bytes=run_bytes,
        source_stride=1,
        target_stride=1,
        imm=imm,
        after=after,
    )


async def settle(transfers: Sequence[Transfer]) -> list[FabricError | None]:
    """Return when all have ended, with the error of each that failed.

    Cancellation: stops posting all of them and goes on when what was posted has drained.
    """
    errors: list[FabricError | None] = [None] * len(transfers)
    try:
        for number, transfer in enumerate(transfers):
            try:
                await transfer
            except FabricError as error:
                errors[number] = error
    except BaseException:
        for transfer in transfers:
            transfer.cancel()
        with anyio.CancelScope(shield=True):
            for transfer in transfers:
                try:
                    await transfer
                except FabricError:
                    pass  # it was cancelled
        raise
    return errors


FEW_CORES_REPORT_S, REPORT_S = 0.005, 0.001
"""A report that is due leaves so much later: rows written meanwhile go along. Where cores are few a report takes time
from what is checked meanwhile."""

LATEST_S, LATEST_PART = 0.25, 8
"""A written row is reported after so long at the latest, or after this part of the sending so far, if that is longer:
receivers check and forward meanwhile what they know of."""

Report = Callable[[str, list[int], list[int], int], Awaitable[None]]


def shares_of(gates: Mapping[str, Gate], coming_bytes: Mapping[str, int]) -> Callable[[str], ReportShare | None]:
    """Return the function that gives the share of a receiver in what one sender writes through these gates.

    The counters of a receiver's senders are different numbers, so their first reports are spread evenly.
    """

    def share_of(receiver: str) -> ReportShare | None:
        gate = gates.get(receiver)
        return None if gate is None else ReportShare(coming_bytes[receiver], gate.share_bytes, begin_of(gate.imm))

    return share_of


@dataclass(slots=True)
class _Unreported:
    """Rows for one receiver: since when, and after which arrival there all of them are."""

    since: float
    rows: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    after: int = 0


class Reporter:
    """Rows that are written and not reported yet, by receiver."""

    def __init__(self, report: Report, share_of: Callable[[str], ReportShare | None] | None = None) -> None:
        """`report` gets (receiver, rows, checksums, after which arrival); one without a share gets each unit."""
        self._report = report
        self._share_of = share_of
        self._shares: dict[str, ReportShare] = {}
        self._unreported: dict[str, _Unreported] = {}
        self._due: set[str] = set()
        self._added = Notice()
        self._last = anyio.Event()
        self._begin = monotonic()

    def add(self, receiver: str, row: int, checksum: int, row_bytes: int = 0, after: int = 0) -> None:
        """Note that a row is written, or that it will be among the first `after` arrivals there, which only grow."""
        unreported = self._unreported.get(receiver)
        if unreported is None:
            unreported = self._unreported[receiver] = _Unreported(monotonic())
            self._added.notify()
        unreported.rows.append(row)
        unreported.sums.append(checksum)
        unreported.after = after
        share = self._shares.get(receiver)
        if share is None and self._share_of is not None and (share := self._share_of(receiver)) is not None:
            self._shares[receiver] = share
        if (share is None or share.add(row_bytes)) and receiver not in self._due:
            self._due.add(receiver)
            self._added.notify()

    def finish(self) -> None:
        """Note that nothing more will be added: the rest is reported at once."""
        self._last.set()
        self._added.notify()

    async def run(self) -> None:
        """Report until `finish`.

        Cancellation: what was not reported is not reported.
        """
        while self._unreported or not self._last.is_set():
            if not self._unreported:
                await self._added.wait()
            elif not self._due and not self._last.is_set():
                with anyio.move_on_after(LATEST_S / 4):
                    await self._added.wait()
            if not self._last.is_set() and self._due:
                with anyio.move_on_after(REPORT_S if ways() > 1 else FEW_CORES_REPORT_S):
                    await self._last.wait()
            for receiver in self._ready():
                unreported = self._unreported.pop(receiver)
                self._due.discard(receiver)
                if (share := self._shares.get(receiver)) is not None:
                    share.reported()
                await self._report(receiver, unreported.rows, unreported.sums, unreported.after)

    def _ready(self) -> list[str]:
        """Return the receivers whose reports leave now."""
        if self._last.is_set():
            return list(self._unreported)
        now = monotonic()
        latest = now - max(LATEST_S, (now - self._begin) / LATEST_PART)
        return [name for name, unreported in self._unreported.items() if name in self._due or unreported.since < latest]


def report_messages(
    version: int, rows: list[int], sums: list[int], kind: ChecksumKind, after: int = 0
) -> Iterator[Written]:
    """Yield the messages that report these rows as written, or as written with so many arrivals."""
    for low in range(0, len(rows), MOST_ROWS):
        part = slice(low, low + MOST_ROWS)
        columns = np.array(rows[part], "<i8").tobytes(), np.array(sums[part], "<u8").tobytes()
        yield Written(version, *columns, kind, after)
