"""Tensors of PyTorch's expandable segments, which lie in memory that is mapped chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
from party import Party

import asyncfabric as af

pytestmark = pytest.mark.anyio

KIB, MIB = 1 << 10, 1 << 20
CONFIG = af.FabricConfig(rails=("cuda:0",))


@pytest.fixture
def _expandable() -> Iterator[None]:
    import torch

    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    torch.cuda.empty_cache()
    settings("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    settings("expandable_segments:False")


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
async def test_a_tensor_over_several_chunks_is_refused_by_name() -> None:
    import torch

    tensor = torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda:0")
    async with af.open_fabric(CONFIG) as fabric:
        with pytest.raises(af.DeviceError, match=r"expandable segments .* turn them off \(PYTORCH_CUDA_ALLOC_CONF\)"):
            await fabric.register(tensor)
        region = await fabric.allocate(128 * MIB, device="cuda:0")
        region.tensor(torch.uint8).fill_(1)
