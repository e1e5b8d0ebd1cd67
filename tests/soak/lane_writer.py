"""The writer's half of a lane: random transfers, cancelled, awaited or left alone; an ended one's source is scorched.

Runs in a `node.py`, on trio or asyncio; judging what arrived is the target's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
from lane_content import MARGIN, POISON, SCORCH, content, own_memory, some_length

import asyncfabric as af
from asyncfabric._api.boxes import write_boxes

Pieces = list[tuple[int, int]]
"""Offsets and lengths."""


class Fault(Exception):
    """A promise of the fabric was broken."""


@dataclass
class Op:
    kind: str
    transfer: Any
    pieces: list[tuple[int, int]]  # of the target
    sources: list[tuple[int, int]]
    arrivals: int
    total: int
    status: str = "open"
    error: str = ""
    bytes: int = 0


class Writer:
    """One run over a lane."""

    def __init__(self, fabric: Any, order: dict[str, Any]) -> None:
        self.fabric, self.order = fabric, order
        self.dice = random.Random(order["seed"])
        self.length: int = order["length"]
        self.key = af.RegionKey.from_bytes(bytes.fromhex(order["key"]))
        self.shelf = af.RegionKey.from_bytes(bytes.fromhex(order["shelf"]))
        self.imm: int = order["imm"]
        self.expected = content(order["lane"], self.length)
        self.readable = content(order["lane"] + 1, self.shelf.length)
        self.next_target = self.next_source = 0
        self.ops: list[Op] = []
        self.reads: list[tuple[int, int, str]] = []
        self.sent: list[str] = []

    async def run(self) -> dict[str, Any]:
        dice = self.dice
        size = self.length + 5000
        self.memory = None if dice.random() < 0.5 else own_memory(dice, size)
        if self.memory is None:
            self.region = await self.fabric.allocate(size)
        else:
            self.region = await self.fabric.register(self.memory.source, access="local")
        self.view = np.frombuffer(memoryview(self.region), np.uint8) if self.memory is None else self.memory.inner
        self.view[:] = SCORCH
        try:
            self.peer = await self.fabric.connect(bytes.fromhex(self.order["address"]))
            workers = dice.choice((1, 1, 2, 4))
            async with anyio.create_task_group() as tasks:
                for number in range(workers):
                    tasks.start_soon(self._work, random.Random(f"{self.order['seed']} {number}"))
            if dice.random() < 0.3:
                await self.region.release()  # with whatever nobody awaited
                self.view[:] = SCORCH
            for op in self.ops:
                await self._settle(op, None)
            if self.memory is not None and not self.memory.guarded():
                raise Fault("guards of the source were overwritten")
        finally:
            with anyio.CancelScope(shield=True):
                await self.region.release()
            self.view[:] = SCORCH
        return self._report()

    async def _work(self, dice: random.Random) -> None:
        mine: list[Op] = []
        for _ in range(self.order["ops"]):
            try:
                op = await self._submit(dice)
            except af.FabricError as error:
                # A stale key, a peer that is lost: raised at the call. What was taken for it stays untouched.
                self.ops.append(Op("refused", None, [], [], 0, 0, "error", f"{type(error).__name__}: {error}"))
                break
            if op is None:
                break
            mine.append(op)
            while len(mine) > dice.randint(0, 24):
                patience = dice.choice((None, None, 0.0, 0.0005, 0.004, 0.03))
                await self._settle(mine.pop(dice.randrange(len(mine))), patience)
            if dice.random() < 0.1:
                await anyio.sleep(dice.random() * 0.01)
            if dice.random() < 0.1:
                await self._read(dice)
        if dice.random() < 0.3:
            await anyio.lowlevel.checkpoint()
            for op in mine:
                if dice.random() < 0.5:
                    op.transfer.cancel()

    async def _submit(self, dice: random.Random) -> Op | None:
        kinds = ["write", "write", "pages", "scatter", "signal", "send"]
        rails = self.fabric.rails
        if self.order["owned"] and len(rails) == 1 and rails[0].can_gather:
            kinds += ["boxes", "boxes"]
        kind = dice.choice(kinds)
        while True:
            mark = (self.next_source, self.next_target)
            try:
                return self._submit_now(kind, dice)
            except af.BusyError:
                self.next_source, self.next_target = mark
                await self.fabric.wait_writable()

    def _place(self, dice: random.Random, lengths: list[int]) -> tuple[Pieces, Pieces] | None:
        pieces, sources = [], []
        target, source = self.next_target, self.next_source
        for length in lengths:
            target += dice.choice((0, 0, 1, 7))
            pieces.append((target, length))
            sources.append((source, length))
            target += length
            source += length
        if target > self.length or source > len(self.view):
            return None
        self.next_target, self.next_source = target, source
        for (to, length), (at, _) in zip(pieces, sources, strict=True):
            self.view[at : at + length] = self.expected[to : to + length]
        return pieces, sources

    def _submit_now(self, kind: str, dice: random.Random) -> Op | None:
        fabric = self.fabric
        imm = self.imm if dice.random() < 0.85 else None
        worth = 0 if imm is None else 1
        most = max(1, self.length // 4)
        if kind == "signal":
            return self._note(Op(kind, fabric.signal(self.peer, self.imm), [], [], 1, 0))
        if kind == "send":
            text = f"{self.order['lane']} {len(self.sent)}".ljust(dice.choice((10, 100, 8192)))
            transfer = fabric.send(self.peer, text.encode())
            self.sent.append("open")
            return self._note(Op(kind, transfer, [(len(self.sent) - 1, 0)], [], 0, len(text)))
        if kind == "write":
            placed = self._place(dice, [some_length(dice, most)])
            if placed is None:
                return None
            (to, length), (at, _) = placed[0][0], placed[1][0]
            transfer = fabric.write(self.region[at : at + length], self.key, to, imm=imm)
            return self._note(Op(kind, transfer, *placed, worth, length))
        if kind == "scatter":
            placed = self._place(dice, [some_length(dice, most // 8 + 1) for _ in range(dice.randint(0, 6))])
            if placed is None:
                return None
            targets = [
                af.ScatterTarget(self.key, at, to, length) for (to, length), (at, _) in zip(*placed, strict=True)
            ]
            transfer = fabric.scatter(self.region, targets, imm=imm)
            return self._note(Op(kind, transfer, *placed, worth * len(targets), sum(n for _, n in placed[0])))
        if kind == "boxes":
            return self._boxes(dice, imm)
        return self._pages(dice, imm)

    def _pages(self, dice: random.Random, imm: int | None) -> Op | None:
        count, size, gap = dice.randint(0, 60), dice.choice((1, 13, 512, 4096, 4097)), dice.choice((0, 0, 3))
        stride = size + gap
        if count * stride > self.length // 3:
            count = self.length // 3 // stride
        if self.next_target + count * stride > self.length or self.next_source + count * stride > len(self.view):
            return None
        first, start = self.next_target, self.next_source
        self.next_target += count * stride
        self.next_source += count * stride
        sources, targets = list(range(count)), list(range(count))
        dice.shuffle(sources)
        dice.shuffle(targets)
        pieces = [(first + page * stride, size) for page in targets]
        froms = [(start + page * stride, size) for page in sources]
        for (to, length), (at, _) in zip(pieces, froms, strict=True):
            self.view[at : at + length] = self.expected[to : to + length]
        transfer = self.fabric.write_pages(
            self.region,
            dice.choice((list, np.array))(sources) if count else sources,
            self.key,
            targets,
            page_bytes=size,
            source_stride=stride,
            target_stride=stride,
            source_offset=start,
            target_offset=first,
            imm=imm,
        )
        return self._note(Op("pages", transfer, pieces, froms, count if imm is not None else 0, count * size))

    def _boxes(self, dice: random.Random, imm: int | None) -> Op | None:
        rows: list[list[int]] = []
        pieces: Pieces = []
        froms: Pieces = []
        target, source = self.next_target, self.next_source
        for _ in range(dice.randint(1, 12)):
            run, runs = 64 * dice.randint(1, dice.choice((4, 400))), dice.randint(4, 60)
            stride = run + dice.choice((0, 0, 3, 128))
            if target + runs * run > self.length or source + runs * stride > len(self.view):
                break
            rows.append([source, target, run, runs, stride])
            pieces += [(target + number * run, run) for number in range(runs)]
            froms += [(source + number * stride, run) for number in range(runs)]
            target += runs * run + dice.choice((0, 0, 1, 7))
            source += runs * stride
        if not rows:
            return None
        self.next_target, self.next_source = target, source
        for (to, length), (at, _) in zip(pieces, froms, strict=True):
            self.view[at : at + length] = self.expected[to : to + length]
        transfer, _ = write_boxes(self.fabric, self.region, np.array(rows, np.int64), self.key, imm)
        total = sum(length for _, length in pieces)
        return self._note(Op("boxes", transfer, pieces, froms, len(rows) if imm is not None else 0, total))

    def _note(self, op: Op) -> Op:
        self.ops.append(op)
        return op

    async def _settle(self, op: Op, patience: float | None) -> None:
        """Await an op, perhaps cancelled after a while; once that ended its sources are the user's again."""
        if op.status != "open":
            return
        scope = anyio.CancelScope() if patience is None else anyio.move_on_after(patience)
        try:
            with scope:
                try:
                    await op.transfer
                finally:
                    if not op.transfer.ended:
                        raise Fault(f"{op.kind}: the await ended before the transfer: {op.transfer!r}")
                    for at, length in op.sources:
                        self.view[at : at + length] = SCORCH
            result = op.transfer.result()
        except af.FabricError as error:
            cancelled = isinstance(error, af.TransferError) and "cancel" in str(error).lower()
            op.status = "cancelled" if cancelled else "error"
            op.error = f"{type(error).__name__}: {error}"
            op.bytes = op.transfer.bytes
            if op.bytes > op.total:
                raise Fault(f"{op.kind}: {op.bytes} of {op.total} bytes left") from None
        else:
            op.status, op.bytes = "ok", result.bytes
            if result.bytes != op.total:
                raise Fault(f"{op.kind}: {result.bytes} bytes of {op.total} and no error")
        if op.kind == "send":
            self.sent[op.pieces[0][0]] = op.status

    async def _read(self, dice: random.Random) -> None:
        """Read into memory of our own, perhaps cancelled, and look at every byte."""
        if not all(rail.can_read for rail in self.fabric.rails):
            return
        length = some_length(dice, self.shelf.length)
        offset = dice.randint(0, self.shelf.length - length)
        array = np.full(length + 2 * MARGIN, POISON, np.uint8)
        region = await self.fabric.register(array)
        try:
            with anyio.CancelScope() if dice.random() < 0.5 else anyio.move_on_after(dice.random() * 0.003):
                transfer = self.fabric.read(self.shelf, offset, region[MARGIN : MARGIN + length])
                await transfer
            state = "ok" if transfer.completion is not None and transfer.completion.code == 0 else "cancelled"
        except af.FabricError as error:
            state = f"{type(error).__name__}: {error}"
        finally:
            with anyio.CancelScope(shield=True):
                await region.release()
        inner, expected = array[MARGIN : MARGIN + length], self.readable[offset : offset + length]
        whole = bool((inner == expected).all())
        if (state == "ok" and not whole) or not ((inner == expected) | (inner == POISON)).all():
            raise Fault(f"read of {length} bytes, {state}: {int((inner != expected).sum())} are wrong")
        if not ((array[:MARGIN] == POISON).all() and (array[MARGIN + length :] == POISON).all()):
            raise Fault("a read wrote beside its destination")
        if state not in ("ok", "cancelled"):
            self.reads.append((offset, length, state))
        array[:] = SCORCH

    def _report(self) -> dict[str, Any]:
        sure = [piece for op in self.ops if op.status == "ok" and op.kind != "send" for piece in op.pieces]
        maybe = [piece for op in self.ops if op.status != "ok" and op.kind != "send" for piece in op.pieces]
        return {
            "sure": sure,
            "maybe": maybe,
            "arrivals": sum(op.arrivals for op in self.ops if op.status == "ok"),
            "most": sum(op.arrivals for op in self.ops),
            "sent": self.sent,
            "errors": [f"{op.kind} of {op.total}: {op.error}" for op in self.ops if op.status == "error"]
            + [text for _, _, text in self.reads],
            "ops": len(self.ops),
            "cancelled": sum(op.status == "cancelled" for op in self.ops),
            "bytes": sum(op.bytes for op in self.ops),
        }
