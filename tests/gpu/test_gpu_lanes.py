"""Launches of copies: several streams in turn, whose counts hold for all earlier writes, and copies of neighbours."""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af

MIB = 1 << 20
LARGE, SMALL, ROUNDS = 48 * MIB, 4096, 12
LENGTH, BLOCKS, TIMES = 32 * MIB, 24, 3  # torch allocates so much by itself, not as a part of something larger


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_a_small_write_is_not_counted_before_the_large_one_ahead_of_it(far: int, lanes: int) -> None:
    import torch

    async def body() -> None:
        here, there = (af.FabricConfig(rails=(f"cuda:{gpu}?lanes={lanes}",)) for gpu in (0, far))
        async with af.open_fabric(here) as writer, af.open_fabric(there) as holder:
            source = await writer.allocate(LARGE, device="cuda:0")
            target = await holder.allocate(LARGE, device=f"cuda:{far}")
            small = await holder.allocate(ROUNDS * SMALL, device=f"cuda:{far}")
            key, key_of_small = target.key(), small.key()
            counter = holder.counter()
            bytes_there = target.tensor(torch.uint8)
            for number in range(1, ROUNDS + 1):
                source.tensor(torch.uint8).fill_(number)
                torch.cuda.synchronize(0)
                large = writer.write(source, key, 0)
                last = writer.write(source[:SMALL], key_of_small, (number - 1) * SMALL, counter.imm)
                await counter.wait(number)
                assert int(bytes_there[-1]) == number and bool((bytes_there == number).all())
                await large
                await last
            found = small.tensor(torch.uint8).view(ROUNDS, SMALL)
            assert found[:, 0].tolist() == list(range(1, ROUNDS + 1)) and bool((found == found[:, :1]).all())

    anyio.run(body, backend="trio")


@pytest.mark.parametrize("source", ["device", "host"])
def test_neighbours_are_written_to_neighbours(source: str) -> None:
    """Each is a copy of its own: the driver refuses one over two allocations, and a rail that it refuses goes down."""
    import torch

    if source == "host":
        blocks = list(torch.empty(BLOCKS, LENGTH, dtype=torch.uint8).unbind())
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
            for _ in range(TIMES):
                found.zero_()
                torch.cuda.synchronize()
                writes = [writer.write(region, key, number * LENGTH) for number, region in enumerate(regions)]
                for write in writes:
                    await write
                for number, row in enumerate(found):
                    assert bool((row == number + 1).all()), f"block {number}"

    anyio.run(body, backend="trio")
