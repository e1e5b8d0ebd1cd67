"""Boxes that the rail gathers: which ones, that their rows state where they lie, and whole updates by them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from test_weight_ordering import WHOLE, boxes
from weight_fixture import open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric._api.boxes import write_boxes
from asyncfabric.weights.memory import host as host_device
from asyncfabric.weights.memory.host import HostDevice
from asyncfabric.weights.memory.rows import Strided
from asyncfabric.weights.receiver import intake
from asyncfabric.weights.sender import pipeline
from asyncfabric.weights.sender.program import Program
from asyncfabric.weights.sender.shards import gathers, is_gathered, open_shards, row_of
from asyncfabric_services.bench.weights.workload import plan_of, rows_of

pytest.importorskip("asyncfabric._native._engine")

Written = Counter[tuple[str, int]]


@given(box=boxes() | boxes(stripes=True))
def test_rows_state_where_a_box_lies(box: tuple[Strided, int, np.ndarray]) -> None:
    """What a row states, run by run, is the box as numpy puts it in order."""
    lies, at, wanted = box
    assert not is_gathered(lies, lies.nbytes // 2), "it is cut at its receiver"
    if not is_gathered(lies, lies.nbytes):
        assert lies.run_bytes % 64 or lies.nbytes < 256
        return
    source, target, run_bytes, *shape = row_of(lies, at, 320)
    sizes, strides = shape[: len(shape) // 2], shape[len(shape) // 2 :]
    view = np.ndarray([*sizes, run_bytes], np.uint8, WHOLE, source, [*strides, 1])
    assert target == 320
    assert np.array_equal(np.ascontiguousarray(view).reshape(-1), wanted)


@pytest.mark.anyio
async def test_what_needs_no_conversion_is_gathered_and_nothing_is_staged() -> None:
    plan = plan_of(trainers=2, receivers=2, replicas=1, matrices=2, side=512, form="copy")
    held = {f"matrix {number}": rows_of(number, 512, 0, 256, 0, "copy") for number in range(2)}
    config = af.FabricConfig(rails=("local",))
    async with (
        af.open_fabric(config) as fabric,
        af.open_fabric(config) as receiver,
        open_shards(fabric, plan, 0, held) as shards,
    ):
        program = Program(plan, 0, shards, True)
        assert all(box.gathered for box in program.boxes) and not program.largest_staged
        assert not any(box.gathered for box in Program(plan, 0, shards).boxes)
        (unit,) = program.units(1 << 30)
        batches = unit.gathered(shards)
        reported = [(batch.receiver, number) for batch in batches for number in batch.numbers]
        assert sorted(reported) == sorted((row.receiver, n) for n, box in enumerate(unit.boxes) for row in box.rows)
        assert all(batch.region is shards.place(unit.boxes[n].parameter)[0] for batch in batches for n in batch.numbers)
        region = await receiver.allocate(4 << 20, access="write")
        memory = np.frombuffer(region.memory, np.uint8)
        for batch in batches:
            memory[:] = 0xA5
            transfer, sums = write_boxes(fabric, batch.region, batch.boxes, region.key())
            await transfer
            for number, row, found in zip(batch.numbers, batch.boxes.tolist(), sums.tolist(), strict=True):
                box = unit.boxes[number]
                wanted = np.ascontiguousarray(shards.box(box.parameter, box.local_start, box.size)).reshape(-1)
                assert np.array_equal(memory[row[1] : row[1] + box.weight_bytes], wanted.view(np.uint8))
                assert found == xxhash.xxh3_64_intdigest(wanted.tobytes())
        await region.release()


def test_it_is_for_one_rail_that_gathers() -> None:
    async def body() -> None:
        for rails, wanted in ((("local",), True), (("local", "local"), False), (("tcp",), False)):
            async with af.open_fabric(af.FabricConfig(rails=rails)) as fabric:
                assert gathers(fabric, HostDevice()) is wanted

    run(body)


def updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Written, **more: Any) -> None:
    """Carry out three updates with few threads, and count the boxes that were gathered."""

    def counted(fabric: af.Fabric, source: af.Region, rows: Any, key: af.RegionKey, imm: Any = None) -> Any:
        written["boxes", len(rows)] += 1
        return write_boxes(fabric, source, rows, key, imm)

    monkeypatch.setattr(pipeline, "write_boxes", counted)

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", **more) as fixture:
            for version in (1, 2, 3):
                await fixture.bring(version)
                fixture.change(version)

    run(body)


@pytest.mark.parametrize("cores", [2, 16])
def test_updates_by_gathered_boxes_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """On few cores; and as on many, where units at both ends are small and receivers check several batches at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(intake, "TRIP_BYTES", 1 << 14)
    written: Written = Counter()
    updated(tmp_path, monkeypatch, written)
    assert sum(written.values()) >= 3 * 2 * 4  # versions, trainers, receivers


def test_their_checksums_are_of_the_kind_that_receivers_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rails sum by XXH3; where receivers want another kind, it is worked out as of everything else."""
    monkeypatch.setattr(host_device.HostDevice, "checksum", "words")
    written: Written = Counter()
    updated(tmp_path, monkeypatch, written)
    assert written


@pytest.mark.parametrize("more", [{"rail": "tcp"}, {"codings": ("delta",), "coding": "always"}])
def test_others_and_what_is_coded_are_written_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    written: Written = Counter()
    updated(tmp_path, monkeypatch, written, **more)
    assert not written


def test_a_byte_that_changes_after_it_was_gathered_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is of what was read at the trainer, not of what lies at the receiver."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            hit: list[int] = []

            def damaging(fabric: af.Fabric, source: af.Region, rows: Any, key: af.RegionKey, imm: Any = None) -> Any:
                transfer, sums = write_boxes(fabric, source, rows, key, imm)
                for copy in fixture.replicas["a/1"]._versions.copies:
                    if not hit and bytes(key) == bytes(copy.doors[0].region.key("write")):
                        while not transfer.done:
                            pass
                        copy.memory[int(rows[0, 1]) + 70] ^= 1
                        hit.append(1)
                return transfer, sums

            monkeypatch.setattr(pipeline, "write_boxes", damaging)
            with pytest.raises(af.BrokenError, match=r"version 2 was not committed: a/1: .*wrong bytes"):
                await fixture.update(2)
            monkeypatch.undo()
            assert hit
            fixture.check(1, before)

    run(body)
