"""What cannot be done with GPU memory is stated clearly, and nothing breaks by it."""

from __future__ import annotations

import pytest

import asyncfabric as af

pytestmark = pytest.mark.anyio

MIB = 1 << 20


class Pointer:
    """Device memory by its bare address, as DLPack-less libraries hold it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}


async def test_a_device_that_is_not_there() -> None:
    with pytest.raises(af.DeviceError, match="there is no device 99"):
        async with af.open_fabric(af.FabricConfig(rails=("cuda:99",))):
            pass


async def test_memory_of_a_gpu_without_a_rail() -> None:
    import torch

    async with af.open_fabric(af.FabricConfig(rails=("local",))) as fabric:
        with pytest.raises(af.DeviceError, match="rail of that GPU"):
            await fabric.register(torch.zeros(10, device="cuda:0"))
        with pytest.raises(af.DeviceError, match="rail of that GPU"):
            await fabric.allocate(10, device="cuda:0")


async def test_more_memory_than_there_is() -> None:
    async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
        with pytest.raises(af.DeviceError, match="bytes are free on cuda:0"):
            await fabric.allocate(1 << 42, device="cuda:0")
        region = await fabric.allocate(MIB, device="cuda:0")
        assert int(region.tensor(__import__("torch").uint8).sum()) == 0


async def test_boxes_are_not_written_over_the_rail_of_a_gpu() -> None:
    """They were, as other bytes: the rail stated that it could do what the rail below it does for host memory."""
    import numpy as np
    import torch

    from asyncfabric._api.boxes import write_boxes

    config = af.FabricConfig(rails=("cuda:0",))
    async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
        assert not writer.rails[0].can_gather
        source = await writer.allocate(MIB)
        for device in ("cuda:0", "cpu"):
            exposed = await target.allocate(MIB, device=device)
            with pytest.raises(af.TransferError, match="can_gather"):
                write_boxes(writer, source, np.array([[0, 0, 4096]], np.int64), exposed.key())
            await exposed.release()
        landed = await target.allocate(MIB, device="cuda:0")
        await writer.write(source, landed.key(), 0)
        assert int(landed.tensor(torch.uint8).sum()) == 0


async def test_memory_that_was_freed() -> None:
    import torch

    async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
        tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0")
        pointer = Pointer(tensor.data_ptr(), 64 * MIB)
        del tensor
        torch.cuda.empty_cache()
        with pytest.raises((af.FabricError, ValueError, TypeError), match="freed"):
            await fabric.register(pointer)


async def test_a_registered_tensor_outlives_its_last_name() -> None:
    import torch

    async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
        region = await fabric.register(torch.full((MIB,), 3, dtype=torch.uint8, device="cuda:0"))
        other = torch.zeros(MIB, dtype=torch.uint8, device="cuda:0")  # would take the block if it were free
        assert int(region.tensor(torch.uint8).sum()) == 3 * MIB
        assert int(other.sum()) == 0


async def test_a_rail_that_knows_no_gpu_refuses_the_region_whole() -> None:
    async with af.open_fabric(af.FabricConfig(rails=("cuda:0", "local"))) as fabric:
        with pytest.raises(af.DeviceError, match="on rail 1"):
            await fabric.allocate(MIB, device="cuda:0")
        region = await fabric.allocate(MIB)
        assert len(region) == MIB
