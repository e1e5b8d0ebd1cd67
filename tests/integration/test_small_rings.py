"""Rails `local` with few entries in their rings: short and long writes are each counted once, and no peer is lost."""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.anyio

WRITES = 160
SHORT, LONG = 64, 32 * 1024
PATIENCE_S = 60


@pytest.mark.parametrize("entries", [8, 16, 32, 64])
@pytest.mark.parametrize("memory", ["allocated", "foreign"])
async def test_unawaited_writes_all_count(entries: int, memory: str) -> None:
    config = af.FabricConfig(rails=(f"local?ring={entries}",))
    async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
        source = await writer.allocate(LONG)
        exposed = await target.allocate(LONG) if memory == "allocated" else await target.register(bytearray(LONG))
        counter = target.counter()
        key = exposed.key()
        transfers = [
            writer.write(source[: LONG if number % 3 == 0 else SHORT], key, 0, imm=counter.imm)
            for number in range(WRITES)
        ]
        with anyio.fail_after(PATIENCE_S):
            for transfer in transfers:
                await transfer
            assert await counter.wait(WRITES) == WRITES
