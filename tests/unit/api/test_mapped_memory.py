"""A peer's memory that this process has mapped: what is stored there is seen, and keys reach what they state."""

from __future__ import annotations

import pytest
import torch

import asyncfabric as af

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

LOCAL, TCP = af.FabricConfig(rails=("local?foreign=cma",)), af.FabricConfig(rails=("tcp:lo",))
"""Within a process a local rail copies without a mapping; with `cma` it goes about as between two."""
HUGE = 2 << 20


@pytest.mark.anyio
async def test_what_is_stored_is_seen_with_the_next_immediate() -> None:
    async with af.open_fabric(LOCAL) as a, af.open_fabric(LOCAL) as b:
        target, source = await b.allocate(HUGE), await a.allocate(4096, access="local")
        key = af.RegionKey.from_bytes(target[4096:12288].key().to_bytes())
        assert a.mapped_memory(key) is None  # nothing was sent yet, so the owner was not asked
        with b.counter(7) as counter:
            await a.write(source[:0], key, 0, imm=7)
            view = a.mapped_memory(key)
            assert view is not None and len(view) == 8192 and not view.readonly
            view[:3], view[-1:] = b"abc", b"z"
            await a.write(source[:0], key, 0, imm=7)
            await counter.wait(2)
        assert bytes(target.memory[4096:4099]) == b"abc" and bytes(target.memory[4096 + 8191 : 4096 + 8193]) == b"z\0"
        await target.release()
        view[:3] = b"def"  # of nobody any more
    with pytest.raises(af.ClosedError):
        a.mapped_memory(key)


@pytest.mark.anyio
async def test_keys_to_read_and_strict_ones_and_foreign_memory_are_not_mapped() -> None:
    async with af.open_fabric(LOCAL) as a, af.open_fabric(LOCAL) as b:
        source, target, own = await a.allocate(64), await b.allocate(4096), await b.register(bytearray(4096))
        for key, found in ((target.key(), True), (target[:64].key(strict=True), False), (own.key(), False)):
            await a.write(source[:8], key, 0)
            assert (a.mapped_memory(key) is not None) is found
        readable = await b.allocate(4096, access="read")
        await a.read(readable.key(), 0, source[:8])
        assert a.mapped_memory(readable.key()) is None


@pytest.mark.anyio
async def test_a_rail_of_another_kind_maps_nothing() -> None:
    async with af.open_fabric(TCP) as a, af.open_fabric(TCP) as b:
        source, target = await a.allocate(64), await b.allocate(4096)
        await a.write(source[:8], target.key(), 0)
        assert a.mapped_memory(target.key()) is None


@pytest.mark.anyio
async def test_memory_that_python_sees_can_have_huge_pages() -> None:
    """A view begins at a boundary of huge pages, as the engine's own mapping does."""
    async with af.open_fabric(LOCAL) as fabric:
        regions = [await fabric.allocate(length) for length in (HUGE, 3 * HUGE + 4096)]
        assert all(region.tensor(torch.uint8).data_ptr() % HUGE == 0 for region in regions)
