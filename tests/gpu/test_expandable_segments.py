"""Tensors of PyTorch's expandable segments, which lie in memory that is mapped chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
from nvlink_fixture import ONE_LOOP
from party import Party, expandable_segments

import asyncfabric as af

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ONE_LOOP)]

KIB, MIB = 1 << 10, 1 << 20
CONFIG = af.FabricConfig(rails=("cuda:0",))


@pytest.fixture
def _expandable() -> Iterator[None]:
    expandable_segments(True)
    yield
    expandable_segments(False)


@pytest.mark.usefixtures("_expandable")
async def test_a_tensor_within_one_chunk_is_memory_like_any_other(far: int) -> None:
    import torch

    tensor = torch.full((256 * KIB,), 7, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    with Party(f"cuda:{far}", f"cuda:{far}", MIB) as peer:
        async with af.open_fabric(CONFIG) as fabric, af.open_fabric(CONFIG) as neighbour:
            region = await fabric.register(tensor)
            with anyio.fail_after(60):
                await fabric.write(region, peer.key, 0, imm=peer.imm)
                assert await peer.asked("bytes", 0, 256 * KIB) == b"\7" * (256 * KIB)
                source = await neighbour.allocate(256 * KIB, device="cuda:0")
                await neighbour.write(source, region.key(), 0)
                assert int(tensor.sum()) == 0


@pytest.mark.usefixtures("_expandable")
async def test_a_tensor_over_several_chunks_is_one_region(far: int) -> None:
    import torch

    length = 150 * MIB + 12345
    keep = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda:0")  # so that the region begins inside a chunk
    content = torch.randint(0, 256, (length,), dtype=torch.uint8)
    tensor = content.to("cuda:0")[777:]
    expected = content[777:].numpy().tobytes()
    torch.cuda.synchronize()
    with Party(f"cuda:{far}", f"cuda:{far}", length) as peer:
        async with af.open_fabric(CONFIG) as fabric, af.open_fabric(CONFIG) as neighbour:
            region = await fabric.register(tensor)
            with anyio.fail_after(60):
                await fabric.write(region, peer.key, 0, imm=peer.imm)
                assert await peer.asked("wait", 1) == 1
                assert await peer.asked("bytes", 0, length - 777) == expected
                # From another process into it: across the borders of its chunks, and by pages.
                tensor.zero_()
                torch.cuda.synchronize()
                source = await neighbour.allocate(length - 777, device="cuda:0")
                source.tensor(torch.uint8).copy_(content[777:])
                torch.cuda.synchronize()
                await neighbour.write(source, region.key(), 0)
                assert tensor.cpu().numpy().tobytes() == expected
                await region.release()
    assert int(keep.sum()) == 0


@pytest.mark.usefixtures("_expandable")
async def test_another_process_writes_across_the_borders_of_chunks(far: int) -> None:
    with Party(f"cuda:{far}", f"cuda:{far}", 130 * MIB, foreign=True, expandable=True) as peer:
        import torch

        async with af.open_fabric(CONFIG) as fabric:
            source = await fabric.allocate(130 * MIB, device="cuda:0")
            content = torch.randint(0, 256, (130 * MIB,), dtype=torch.uint8)
            source.tensor(torch.uint8).copy_(content)
            torch.cuda.synchronize()
            with anyio.fail_after(60):
                await fabric.write(source, peer.key, 0, imm=peer.imm)
                assert await peer.asked("wait", 1) == 1
                assert await peer.asked("bytes", 0, 130 * MIB) == content.numpy().tobytes()
                page = 64 * KIB
                order = torch.randperm(130 * MIB // page)
                await fabric.write_pages(source, torch.arange(len(order)), peer.key, order, page_bytes=page)
                got = await peer.asked("bytes", 0, 130 * MIB)
    wanted = torch.empty_like(content).view(-1, page)
    wanted[order] = content.view(-1, page)
    assert got == wanted.numpy().tobytes()
