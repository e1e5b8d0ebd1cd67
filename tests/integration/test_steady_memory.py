"""What stays after work is done: nothing. Contexts go back, and memory at a used address is not taken for older one."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
from availability import need

import asyncfabric as af

PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("rail", ["local", "tcp", "fault+local?reorder=16"])
def test_transfers_leave_no_memory_behind(rail: str) -> None:
    """A context of 64 bytes for each of 300,000 pages, kept, would be 19 MB."""
    need(rail)

    async def check() -> None:
        config = af.FabricConfig(rails=(rail,))
        async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
            exposed = await target.register(bytearray(64 * 1000), access="write")
            source = await writer.register(bytearray(64 * 2000), access="local")
            key = af.RegionKey.from_bytes(bytes(exposed.key()))
            counter = target.counter()
            numbers = list(range(1000))

            async def batches(count: int) -> None:
                for _ in range(count):
                    await writer.write_pages(
                        source,
                        numbers,
                        key,
                        numbers,
                        page_bytes=64,
                        source_stride=128,
                        target_stride=64,
                        imm=counter.imm,
                    )

            await batches(40)  # slabs and rings reach their size
            before = _resident()
            await batches(300)
            assert await counter.wait(340_000) == 340_000
            grown = _resident() - before
            assert grown < 4 << 20, f"{grown} bytes more than before"

    with_deadline(check)


def test_memory_at_the_same_address_gets_a_key_of_its_own() -> None:
    """Release, and register the same bytes again: the old key is dead, whatever a cache would have for the address."""
    need("local", "tcp")

    async def check() -> None:
        for rail in ("local", "tcp"):
            config = af.FabricConfig(rails=(rail,))
            async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
                memory = bytearray(8192)
                source = await writer.register(bytearray(b"\x01" * 8192), access="local")
                first = await target.register(memory, access="write")
                old = af.RegionKey.from_bytes(bytes(first.key()))
                await writer.write(source, old, 0)
                memory_view = memoryview(memory)
                memory_view[:] = bytes(8192)
                memory_view.release()
                await first.release()
                second = await target.register(memory, access="write")
                with pytest.raises((af.StaleKeyError, af.TransferError)):
                    await writer.write(source, old, 0)
                assert memory.count(1) == 0
                await writer.write(source, af.RegionKey.from_bytes(bytes(second.key())), 0)
                assert memory.count(1) == 8192

    with_deadline(check)


def with_deadline(check: object) -> None:
    """Run one check under trio; a hang fails it."""

    async def bounded() -> None:
        with anyio.fail_after(60):
            await check()  # type: ignore[operator]

    anyio.run(bounded, backend="trio")
