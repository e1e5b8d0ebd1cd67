"""What a receiver checks: every row once, however many words wait, by one thread or several; what was not shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from weight_fixture import small_plan

import asyncfabric as af
from asyncfabric._queue import Queue
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.host import HostDevice
from asyncfabric.weights.memory.rows import layout_of
from asyncfabric.weights.messages import Written
from asyncfabric.weights.receiver import intake as module
from asyncfabric.weights.receiver.awaited import RowPlaces
from asyncfabric.weights.receiver.copies import Copy, open_copies
from asyncfabric.weights.receiver.intake import Intake

pytestmark = pytest.mark.anyio
pytest.importorskip("asyncfabric._native._engine")


@asynccontextmanager
async def open_intake(checks: int) -> AsyncIterator[tuple[Intake, Copy, list[tuple[str, Written]]]]:
    """Open one of a replica's first receiver, over random bytes, and what senders report of them, row by row."""
    plan, device = small_plan(), HostDevice()
    device.checks = checks
    async with (
        af.open_fabric(af.FabricConfig(rails=("local",))) as fabric,
        open_copies(fabric, layout_of(plan, 0), 1, device) as (copy,),
    ):
        places = RowPlaces(plan, 0)
        copy.memory[:] = np.random.default_rng(1).integers(0, 256, len(copy.memory), np.uint8)
        intake = Intake(fabric, plan, places, "a", copy)
        sums = places.summing(copy, "xxh3", intake.rows)(range(len(intake.rows))).result()
        names = {number: name for name, number in intake.names.items()}
        words = [
            (names[sender], Written(1, np.array([row], "<i8").tobytes(), np.array([found], "<u8").tobytes(), "xxh3"))
            for row, sender, found in zip(intake.rows.tolist(), intake._senders.tolist(), sums, strict=True)
        ]
        try:
            yield intake, copy, words
        finally:
            intake.close()
            await copy.close()


@pytest.mark.parametrize("checks", [1, 4])
@pytest.mark.parametrize("trip_bytes", [1, 1 << 12, 1 << 30])
async def test_every_row_is_checked_once(monkeypatch: pytest.MonkeyPatch, checks: int, trip_bytes: int) -> None:
    monkeypatch.setattr(module, "TRIP_BYTES", trip_bytes)
    async with open_intake(checks) as (intake, _, words):
        assert len(words) > 8
        for half in (words[::2], words[1::2]):
            for word in half:
                intake.take(*word, decoded=True)  # no write is counted for it
        verified: Counter[int] = Counter()

        async def take(rows: list[int], sums: list[int], kind: ChecksumKind) -> None:
            assert kind == "xxh3" and len(rows) == len(sums)
            verified.update(rows)

        await intake.run(take)
        assert verified == Counter(intake.rows.tolist())


@pytest.mark.parametrize("checks", [1, 4])
async def test_one_wrong_byte_among_many_words_is_named(monkeypatch: pytest.MonkeyPatch, checks: int) -> None:
    monkeypatch.setattr(module, "TRIP_BYTES", 1 << 12)
    async with open_intake(checks) as (intake, copy, words):
        copy.memory[len(copy.memory) // 2] ^= 1
        for word in words:
            intake.take(*word, decoded=True)
        verified: list[int] = []

        async def take(rows: list[int], sums: list[int], kind: ChecksumKind) -> None:
            verified.extend(rows)

        with pytest.raises(af.BrokenError, match=f"1 of {len(words)} rows have wrong bytes"):
            await intake.run(take)
        assert len(verified) == len(words) - 1 == len(set(verified))


async def test_a_row_that_nobody_checked_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should rows ever get lost on their way to the check, the version is not taken."""
    async with open_intake(1) as (intake, _, words):
        for word in words:
            intake.take(*word, decoded=True)
        assert isinstance(intake._queue, Queue)
        assert intake._queue.next_nowait() is not None

        async def take(rows: list[int], sums: list[int], kind: ChecksumKind) -> None:
            pass

        with pytest.raises(af.BrokenError, match=f"1 of {len(words)} rows were not checked"):
            await intake.run(take)
