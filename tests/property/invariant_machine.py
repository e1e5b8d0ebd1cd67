"""Runs a random program over two fabrics and checks INV-1, INV-2 and INV-3 at every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
from random_programs import (
    PLAIN,
    POISON,
    SCORCH,
    SOURCE_BYTES,
    TARGET_BYTES,
    VOID,
    Pause,
    Piece,
    Plan,
    Planned,
    Revoke,
    Settle,
    Step,
    Submit,
    present,
)

import asyncfabric as af

OpenFabric = Callable[[], AbstractAsyncContextManager[Any]]
IMM = 77


class Machine:
    """One run: the fabrics, their memory, and what the model knows."""

    def __init__(self, writer: Any, target: Any, seed: int) -> None:
        self.writer, self.target = writer, target
        self.content = random.Random(seed).choices(PLAIN, k=SOURCE_BYTES)
        self.plan = Plan(bytes(self.content))
        self.pieces: list[Piece] = []  # of everything ever submitted with the counter's imm
        self.open: list[tuple[Planned, Any]] = []  # submitted, not awaited
        self.ended: list[tuple[Planned, Any]] = []
        self.void = False  # the target was revoked: old pieces must not show up any more
        self.certain = 0  # arrivals of transfers that were awaited to a good end
        self.revocations = 0
        self.submitted = 0  # arrivals of everything ever submitted

    async def prepare(self) -> None:
        self.source_memory = bytearray(self.content)
        self.target_memory = bytearray([POISON]) * TARGET_BYTES
        self.region = await self.writer.register(self.source_memory, access="local")
        self.exposed = await self.target.register(self.target_memory, access="write")
        self.peer = await self.writer.connect(af.FabricAddress.from_bytes(bytes(self.target.address)))
        self.counter = self.target.counter(IMM)
        self.memory = memoryview(self.target_memory)
        self.fetch_key()

    def fetch_key(self) -> None:
        self.key = af.RegionKey.from_bytes(bytes(self.exposed.key(access="write")))

    async def run(self, program: list[Step]) -> None:
        for step in program:
            match step:
                case Submit():
                    self.submit(step)
                case Settle(which, patience):
                    await self.settle(which, patience)
                case Pause(turns):
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                case Revoke():
                    await self.revoke()
            self.check_counts()
        while self.open:
            await self.settle(0, None)
        await self.quiesce()
        await self.counter.wait(self.certain)
        assert self.counter.value <= self.submitted, "something was counted twice"
        self.check_counts()
        self.check_memory()

    def submit(self, step: Submit) -> None:
        planned = self.plan.place(step)
        if planned is None:
            return
        start, end = planned.source, planned.source + planned.length
        self.pieces += planned.pieces
        self.submitted += len(planned.pieces)
        planned.generation = self.revocations
        match step.op:
            case "write":
                transfer = self.writer.write(self.region[start:end], self.key, planned.pieces[0].offset, imm=IMM)
            case "pages":
                size = step.lengths[0] if step.lengths else 1
                pages = list(range(len(step.lengths)))
                transfer = self.writer.write_pages(
                    self.region,
                    pages,
                    self.key,
                    pages,
                    page_bytes=size,
                    source_stride=size,
                    target_stride=size + step.gap,
                    source_offset=start,
                    target_offset=planned.pieces[0].offset if pages else 0,
                    imm=IMM,
                )
            case "scatter":
                targets = [
                    af.ScatterTarget(self.key, source, piece.offset, len(piece.content))
                    for source, piece in zip(planned.sources, planned.pieces, strict=True)
                ]
                transfer = self.writer.scatter(self.region, targets, imm=IMM)
            case "signal":
                transfer = self.writer.signal(self.peer, IMM)
        self.open.append((planned, transfer))

    async def settle(self, which: int, patience: int | None) -> None:
        """Await one transfer, perhaps cancelled, and scorch its source at once."""
        if not self.open:
            return
        planned, transfer = self.open.pop(which % len(self.open))
        if patience is None:
            await self.outcome(planned, transfer)
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.outcome, planned, transfer)
                for _ in range(patience):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        self.source_memory[planned.source : planned.source + planned.length] = bytes([SCORCH]) * planned.length
        self.ended.append((planned, transfer))

    async def outcome(self, planned: Planned, transfer: Any) -> None:
        try:
            result = await transfer
        except (af.StaleKeyError, af.TransferError) as error:
            assert planned.generation < self.revocations, f"failed without a reason: {error!r}"
        else:
            assert result.bytes == planned.length
            self.certain += len(planned.pieces)

    async def revoke(self) -> None:
        """INV-3: from the return of revoke() on, nothing of the old key lands. Old arrivals stay counted."""
        await self.exposed.revoke()
        self.target_memory[:] = bytes([VOID]) * TARGET_BYTES
        self.void = True
        self.revocations += 1
        self.pieces.clear()
        self.plan.next_target = 0
        self.fetch_key()

    async def quiesce(self) -> None:
        """Wait until a later arrival of the same rails was counted, several times."""
        late = self.target.counter()
        for number in range(1, 41):
            await self.writer.signal(self.peer, late.imm)
            await late.wait(number)

    def check_counts(self) -> None:
        """INV-1: the value is read first, so the bytes of so many arrivals are there now."""
        value = self.counter.value
        if not self.void:  # after a revocation the model cannot know which of the old ones were counted
            there = present(self.memory, self.pieces)
            assert value <= there, f"the counter states {value}, but {there} arrivals are complete"

    def check_memory(self) -> None:
        memory = bytes(self.target_memory)
        assert bytes([SCORCH]) not in memory, "a source was read after its await had ended (INV-2)"
        expected = bytearray([VOID if self.void else POISON]) * TARGET_BYTES
        for piece in self.pieces:
            expected[piece.offset : piece.offset + len(piece.content)] = piece.content
        background = VOID if self.void else POISON
        if memory != expected:
            for position, (got, wanted) in enumerate(zip(memory, expected, strict=True)):
                assert got in (wanted, background), f"byte {position} is {got:#x}: neither {wanted:#x} nor untouched"
        if self.void:
            return
        for planned, transfer in self.ended:
            landed = sum(
                len(piece.content) - memory[piece.offset : piece.offset + len(piece.content)].count(POISON)
                for piece in planned.pieces
            )
            assert landed <= transfer.bytes, f"{landed} bytes landed, {transfer.bytes} are stated to have left"


async def run_program(open_writer: OpenFabric, open_target: OpenFabric, program: list[Step], seed: int) -> None:
    """Open both fabrics and run the program, within a deadline."""
    with anyio.fail_after(30):
        async with open_writer() as writer, open_target() as target:
            machine = Machine(writer, target, seed)
            await machine.prepare()
            await machine.run(program)
