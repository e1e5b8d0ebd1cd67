"""Regions whose addresses follow each other, written to places that do: each stays a copy of its own.

The driver refuses one copy over two allocations, and a rail whose copy was refused goes down.
"""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af

MIB = 1 << 20
LENGTH, BLOCKS, ROUNDS = 32 * MIB, 24, 3  # torch allocates so much by itself, not as a part of something larger


@pytest.mark.parametrize("source", ["device", "host"])
def test_neighbours_are_written_to_neighbours(source: str) -> None:
    import torch

    whole = torch.empty(BLOCKS * LENGTH, dtype=torch.uint8) if source == "host" else None
    if whole is not None:
        blocks = list(whole.split(LENGTH))
    else:
        blocks = [torch.empty(LENGTH, dtype=torch.uint8, device="cuda:0") for _ in range(BLOCKS)]
        blocks.sort(key=lambda block: block.data_ptr())
    ends = {block.data_ptr() + LENGTH for block in blocks}
    assert any(block.data_ptr() in ends for block in blocks), "no two allocations follow each other: nothing is tested"
    for number, block in enumerate(blocks):
        block.fill_(number + 1)
    torch.cuda.synchronize()

    async def body() -> None:
        config = af.FabricConfig(rails=("cuda:0",))
        async with af.open_fabric(config) as writer, af.open_fabric(config) as holder:
            target = await holder.allocate(BLOCKS * LENGTH, device="cuda:0")
            regions = [await writer.register(block) for block in blocks]
            key = target.key()
            found = target.tensor(torch.uint8).view(BLOCKS, LENGTH)
            for _ in range(ROUNDS):
                found.zero_()
                torch.cuda.synchronize()
                writes = [writer.write(region, key, number * LENGTH) for number, region in enumerate(regions)]
                for write in writes:
                    await write
                for number, row in enumerate(found):
                    assert bool((row == number + 1).all()), f"block {number}"

    anyio.run(body, backend="trio")
