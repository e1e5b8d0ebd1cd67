"""Proxy: carries parcels between the GPUs of this host and those of others, over any rail.

Runs on the event loop's thread. What is on the path of a step needs no Python: writes are submitted before their step
begins, and the engine's worker posts them when the kernels' watch word asks; counters flag the kernels that receive.
The tasks here submit the writes of the next step, send what did not fit the first write, note that parcels may be
packed again, and show kernels whom they would wait for in vain.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import anyio
import anyio.abc
import numpy as np

from asyncfabric import BusyError, Fabric, ImmCounter, Peer, Region, RegionKey, WatchWord
from asyncfabric.errors import FabricError
from asyncfabric.moe.gpu.layout import HEAD_BYTES, NvlinkLayout


class Kind(IntEnum):
    """What arrives from a rank behind a proxy; all but verdicts once for each step at most."""

    THERE = 0
    REST = 1
    BACK = 2
    VERDICT = 3


STEP_KINDS = (Kind.THERE, Kind.REST, Kind.BACK)


def immediates(ranks: int, in_flight: int) -> int:
    """Return how many immediates the proxies of an exchange need."""
    return len(Kind) * in_flight * ranks


def imm_of(base: int, ranks: int, in_flight: int, kind: Kind, turn: int, sender: int) -> int:
    """Return the immediate of one kind of message of one sender in one turn, the same at all receivers."""
    return base + (kind * in_flight + turn) * ranks + sender


class Notes:
    """Words that the proxy stores for kernels; for each rank [lost][settled there, by turns][settled back, by turns].

    A turn's word is the last step of which nothing reads the parcels any more.
    """

    def __init__(self, words: np.ndarray[Any, Any], in_flight: int) -> None:
        """Store into words of shape [ranks, 1 + 2 * in_flight], int32."""
        self._words = words
        self._in_flight = in_flight

    def lose(self, rank: int) -> None:
        """Note that nothing more comes from a rank."""
        self._words[rank, 0] = 1

    def settle(self, rank: int, back: bool, step: int) -> None:
        """Note that what a step packed for a rank has been read."""
        self._words[rank, self._place(back, step)] = step

    def settled(self, rank: int, back: bool, step: int) -> bool:
        """Return whether what was packed for a rank by a step, and by those in the other turns, has been read."""
        steps = range(max(1, step - self._in_flight + 1), step + 1)
        return all(self._words[rank, self._place(back, each)] >= each for each in steps)

    def _place(self, back: bool, step: int) -> int:
        return 1 + back * self._in_flight + (step - 1) % self._in_flight


class Proxy:
    """The tasks of one epoch at one rank.

    Attributes:
        losses: why nothing more comes from a rank.
        counters: of what comes, by kind, turn and rank.
    """

    def __init__(
        self,
        fabric: Fabric,
        layout: NvlinkLayout,
        rank: int,
        base: int,
        peers: Mapping[int, Peer],
        keys: Mapping[int, RegionKey],
        regions: tuple[Region, Region],
        reported: Sequence[WatchWord],
        notes: Notes,
    ) -> None:
        """Open the counters.

        Args:
            fabric: of this rank.
            layout: of the exchange.
            rank: of this process.
            base: first immediate.
            peers: the ranks behind the proxy.
            keys: to the block of this rank at each of them.
            regions: memory of what goes out and of what comes in, a block for each rank in ascending order.
            reported: words that kernels store: steps whose dispatch, whose combine was packed, and 1 with a verdict.
            notes: for kernels.
        """
        self.losses: dict[int, str] = {}
        self.counters: dict[tuple[Kind, int, int], ImmCounter] = {}
        self._fabric = fabric
        self._layout = layout
        self._rank = rank
        self._base = base
        self._peers = peers
        self._keys = keys
        self._outgoing, self._incoming = regions
        self._reported = reported
        self._notes = notes
        self._blocks = {far: number * layout.block_bytes for number, far in enumerate(sorted(peers))}
        self._turns = range(layout.config.in_flight)
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._moved = anyio.Event()
        self._judged: set[int] = set()
        try:
            for far in peers:
                for turn in self._turns:
                    for kind in STEP_KINDS:
                        self.counters[kind, turn, far] = fabric.counter(self._imm(kind, turn, far))
                self.counters[Kind.VERDICT, 0, far] = fabric.counter(self._imm(Kind.VERDICT, 0, far))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the counters; no kernel may wait for them any more."""
        for counter in self.counters.values():
            counter.close()

    async def run(self) -> None:
        """Carry steps until `finish`.

        Cancellation: what is posted is drained, what is not is never sent.
        """
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    for far in self._peers:
                        tasks.start_soon(self._watch, far)
                        tasks.start_soon(self._judge, far)
                        for turn in self._turns:
                            tasks.start_soon(self._there, far, turn)
                            tasks.start_soon(self._back, far, turn)
        finally:
            for far in self._peers:
                self._notes.lose(far)  # kernels that wait when a caller is cancelled need not wait for their deadline
            self._ended.set()

    async def finish(self, patience_s: float) -> None:
        """End the tasks once all that kernels reported has been sent; no kernel of this epoch runs any more.

        Args:
            patience_s: what is not sent by then never is: its receiver stands still.

        Cancellation: they end all the same; only the wait for it is cut short.
        """
        try:
            with anyio.move_on_after(patience_s):
                while not self._ended.is_set() and self._owes():
                    await self._moved.wait()
        finally:
            self._scope.cancel()
        await self._ended.wait()

    def _owes(self) -> bool:
        """Whether something that kernels reported is still to be sent to a rank that is there."""
        self._moved = anyio.Event()
        steps, verdict = [word.value for word in self._reported[:2]], bool(self._reported[2].value)
        return any(
            (verdict and far not in self._judged)
            or not all(self._notes.settled(far, back, step) for back, step in zip((False, True), steps, strict=True))
            for far in self._peers
            if far not in self.losses
        )

    async def _there(self, far: int, turn: int) -> None:
        """Tokens of this rank: the first write is submitted a step ahead, and leaves by the kernels' word."""
        for step in itertools.count(turn + 1, len(self._turns)):
            first = self._layout.first_span(step)
            sent = await self._write(far, first, Kind.THERE, turn, self._reported[0].reaches(step))
            if sent:
                begin, end = self._layout.rest_span(step, self._rows(self._outgoing, far, step))
                if begin < end:
                    sent = await self._write(far, (begin, end), Kind.REST, turn)
            self._settle(far, False, step)
            if not sent:
                return

    async def _back(self, far: int, turn: int) -> None:
        """Sums for tokens of another rank: how many is known once its tokens are there."""
        arrivals = self.counters[Kind.THERE, turn, far]
        for number, step in enumerate(itertools.count(turn + 1, len(self._turns)), 1):
            try:
                await arrivals.wait(number)
            except FabricError as error:  # the fabric is being closed
                self._lose(far, error)
                return
            span = self._layout.back_span(step, self._rows(self._incoming, far, step))
            sent = await self._write(far, span, Kind.BACK, turn, self._reported[1].reaches(step))
            self._settle(far, True, step)
            if not sent:
                return

    async def _judge(self, far: int) -> None:
        """The verdict of this rank's kernels, if they ever give one."""
        await self._write(far, (0, HEAD_BYTES), Kind.VERDICT, 0, self._reported[2].reaches(1))
        self._judged.add(far)
        self._moved.set()

    async def _watch(self, far: int) -> None:
        """Learn of a loss, also while nothing is written to the rank."""
        try:
            await self.counters[Kind.VERDICT, 0, far].wait(1, peers=[self._peers[far]])
        except FabricError as error:
            self._lose(far, error)

    async def _write(self, far: int, span: tuple[int, int], kind: Kind, turn: int, after: object = None) -> bool:
        """Write a part of a block; returns whether it arrived. Nothing reads the block afterwards either way."""
        begin, end = span
        at = self._blocks[far]
        source, imm = self._outgoing[at + begin : at + end], self._imm(kind, turn, self._rank)
        while True:
            try:
                await self._fabric.write(source, self._keys[far], begin, imm=imm, after=after)
                return True
            except BusyError:
                await self._fabric.wait_writable()
            except FabricError as error:
                self._lose(far, error)
                return False

    def _settle(self, far: int, back: bool, step: int) -> None:
        self._notes.settle(far, back, step)
        self._moved.set()

    def _lose(self, far: int, error: FabricError) -> None:
        self.losses.setdefault(far, str(error))
        self._notes.lose(far)
        self._moved.set()

    def _rows(self, region: Region, far: int, step: int) -> int:
        """Return how many rows were packed into a parcel: the second word of its head."""
        at = self._blocks[far] + self._layout.parcel(step) + self._layout.offsets.head
        return int(np.frombuffer(region.memory[at : at + HEAD_BYTES], dtype=np.uint32)[1])

    def _imm(self, kind: Kind, turn: int, sender: int) -> int:
        config = self._layout.config
        return imm_of(self._base, config.ranks, config.in_flight, kind, turn, sender)
