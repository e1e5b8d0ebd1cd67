"""Launches that go to several streams in turn: what a count means holds for all earlier writes of its peer."""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af

MIB = 1 << 20
LARGE, SMALL, ROUNDS = 48 * MIB, 4096, 12


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
