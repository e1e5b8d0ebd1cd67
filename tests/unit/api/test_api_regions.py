"""Regions: what may be registered, views without copies, revoke, release under INV-2, and quarantine."""

from __future__ import annotations

import array
import gc
import mmap
import weakref
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from fabrics import Outcome, open_fake, open_pair, settled

import asyncfabric as af
from asyncfabric._bridge.quarantine import pinned
from asyncfabric._bridge.status import StatusCode
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio


class Foreign:
    """Somebody's array that speaks DLPack only."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"0123456789abcdef"),
        lambda: memoryview(bytearray(b"0123456789abcdef")),
        lambda: array.array("B", b"0123456789abcdef"),
        lambda: np.frombuffer(bytearray(b"0123456789abcdef"), np.uint8).reshape(4, 4),
        lambda: torch.tensor(list(b"0123456789abcdef"), dtype=torch.uint8),
        lambda: torch.tensor(list(b"0123456789abcdef"), dtype=torch.uint8).view(torch.bfloat16),
        lambda: Foreign(torch.tensor(list(b"0123456789abcdef"), dtype=torch.uint8)),
        lambda: Foreign(np.frombuffer(bytearray(b"0123456789abcdef"), np.uint8)),
    ],
    ids=["bytearray", "memoryview", "array", "ndarray", "tensor", "bfloat16", "dlpack torch", "dlpack numpy"],
)
async def test_memory_of_all_kinds_is_registered_in_place(make: Any) -> None:
    async with open_pair() as p:
        buffer = make()
        region = await p.writer.register(buffer)
        assert (len(region), region.length, region.device, region.access) == (16, 16, "cpu", "read-write")
        assert bytes(region.memory) == b"0123456789abcdef"
        await p.writer.write(region[4:8], p.key, 0)
        assert bytes(p.target.memory[:4]) == b"4567"
        await p.writer.read(p.key, 0, region[0:4])
        assert bytes(memoryview(region)[:8]) == b"45674567"
        await region.release()


@pytest.mark.parametrize(
    ("buffer", "error", "states"),
    [
        (bytearray(), ValueError, "empty bytearray"),
        (torch.empty(0), ValueError, "empty Tensor"),
        (np.zeros((4, 4))[:, ::2], ValueError, "contiguous"),
        (np.asfortranarray(np.zeros((4, 3))), ValueError, "contiguous"),
        (torch.zeros(4, 4).t(), ValueError, "contiguous"),
        (torch.zeros(4, 4).to_sparse(), (TypeError, ValueError), "sparse|contiguous"),
        (np.array([object()]), TypeError, "Python objects"),
        (torch.empty(4, device="meta"), TypeError, "meta"),
        ("text", TypeError, "str"),
        (3, TypeError, "int"),
        (b"constant", ValueError, "read-only bytes may be registered"),
    ],
)
async def test_other_things_are_refused(buffer: Any, error: Any, states: str) -> None:
    async with open_fake(FakeNetwork()) as fabric:
        with pytest.raises(error, match=states):
            await fabric.register(buffer)
        assert fabric.statistics().regions == 0


async def test_a_read_only_buffer_stays_read_only() -> None:
    async with open_pair() as p:
        data = b"constant"
        region = await p.writer.register(data, access="read")
        assert region.memory.readonly and bytes(region.memory) == data
        with pytest.raises(TypeError):
            memoryview(region)
        with pytest.raises(ValueError, match="read-only"):
            p.writer.read(p.key, 0, region)
        with pytest.raises(ValueError, match="read-only"):
            region.tensor(torch.uint8)
        with pytest.raises(ValueError, match="registered with 'read'"):
            region.key("write")
        await p.writer.write(region, p.key, 0)
        assert bytes(p.target.memory[:8]) == data


async def test_views_share_the_memory() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        region = await fabric.allocate(4096)
        assert bytes(region.memory) == bytes(4096)
        view = memoryview(region)
        view[0:4] = b"\x01\x00\x00\x00"
        assert region.tensor(torch.int32)[0] == 1
        tensor = region[16:80].tensor(torch.float32, (4, 2))
        tensor.fill_(1.5)
        assert np.frombuffer(region, np.float32, count=8, offset=16).tolist() == [1.5] * 8
        assert (np.asarray(region)[48:80] == 0).all()
        assert region.tensor(torch.uint8, 5).shape == (5,) and region.tensor(torch.uint8, [0, 3]).shape == (0, 3)
        for call, states in (
            (lambda: region.tensor(torch.float64, (513,)), "needs 4104 bytes"),
            (lambda: region[1:9].tensor(torch.float64), "not aligned"),
            (lambda: region[0:7].tensor(torch.float32), "no whole number"),
            (lambda: region.tensor(torch.int8, (-1,)), "shape must be >= 0"),
        ):
            with pytest.raises(ValueError, match=states):
                call()
        with pytest.raises(TypeError, match=r"torch\.dtype"):
            region.tensor("float32")
        del view


async def test_allocated_memory_can_be_looked_at_after_release() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        region = await fabric.allocate(4096)
        tensor = region.tensor(torch.uint8)
        tensor.fill_(7)
        await region.release()
        assert int(tensor.sum()) == 7 * 4096
    assert int(tensor.sum()) == 7 * 4096


async def test_slices_of_slices_and_keys_to_parts() -> None:
    async with open_pair() as p:
        part = p.target[100:200][10:20]
        assert (part.offset, part.length, len(part), part.region) == (110, 10, 10, p.target)
        key = part.key("write")
        assert key.length == 10 and key.access == "write"
        await p.writer.write(p.source[1:4], key, 7)
        assert bytes(p.target.memory[117:120]) == bytes(p.source.memory[1:4])
        with pytest.raises(ValueError, match="beyond the 10 bytes"):
            p.writer.write(p.source[1:5], key, 7)


async def test_revoked_keys_are_stale_and_new_ones_work() -> None:
    async with open_pair() as p:
        old = p.key
        await p.writer.write(p.source[:8], old, 0)
        await p.target.revoke()
        new = p.target.key()
        assert new != old and new.generation == old.generation + 1
        with pytest.raises(af.StaleKeyError, match="new key"):
            await p.writer.write(p.source[8:16], old, 0)
        await p.writer.write(p.source[8:16], new, 0)


async def test_release_waits_for_work_in_flight_and_is_idempotent() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        buffer = bytearray(64)
        region = await p.writer.register(buffer)
        transfer = p.writer.write(region, p.key, 0)
        first, second = Outcome(), Outcome()
        tasks.start_soon(first.run, region.release)
        await settled()
        tasks.start_soon(second.run, region.release)
        await settled()
        assert region.released and not first.ended and not second.ended
        with pytest.raises(af.ClosedError, match="Region"):
            p.writer.write(region, p.key, 0)
        with pytest.raises(af.ClosedError):
            region.key()
        first.scope.cancel()
        await settled()
        assert not first.ended, "INV-2: release ended while the memory could still be read"
        p.network.deliver()
        await settled()
        assert first.cancelled and second.ended and second.error is None
        await transfer
        await region.release()


async def test_memory_lives_until_release_or_close_even_without_a_reference() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        released, forgotten = torch.zeros(16), torch.zeros(16)
        first, second = weakref.ref(released.untyped_storage()), weakref.ref(forgotten.untyped_storage())
        region = await fabric.register(released)
        with pytest.warns(ResourceWarning, match=r"<Region 2: 64 bytes on cpu> was dropped without .*release"):
            await fabric.register(forgotten)
        del released, forgotten
        gc.collect()
        assert first() is not None and second() is not None, "INV-2: freed while it is registered"
        await region.release()
        del region
        gc.collect()
        assert first() is None and second() is not None
    gc.collect()
    assert second() is None


async def test_a_quarantined_region_stays_pinned_and_release_reports_it() -> None:
    config = af.FabricConfig(drain_deadline=0.05)
    async with open_pair(config, hold=True, can_flush=False) as p:
        buffer, pinned_before = bytearray(64), len(pinned())
        region = await p.writer.register(buffer)
        transfer = p.writer.write(region, p.key, 0)
        assert not transfer.done
        transfer.cancel()
        with pytest.raises(af.FabricError):
            await transfer
        with pytest.raises(af.TransferError, match=rf"releasing <Region {region.id}") as caught:
            await region.release()
        assert "pinned" in str(caught.value)
    del region, transfer, caught
    gc.collect()
    with pytest.raises(BufferError):
        buffer.append(0)
    assert len(pinned()) == pinned_before + 1


async def test_a_failing_registration_states_why() -> None:
    network = FakeNetwork()
    async with open_fake(network) as fabric:
        network.fail_next_control(StatusCode.NO_MEMORY, raw=12)
        with pytest.raises(af.DeviceError, match=r"allocating 4096 bytes.*Cannot allocate memory.*ulimit") as caught:
            await fabric.allocate(4096)
        assert caught.value.raw == 12


@pytest.mark.parametrize("how", ["register", "allocate"])
async def test_cancelled_registration_leaves_no_region(how: str) -> None:
    network = FakeNetwork()
    async with open_fake(network) as fabric, anyio.create_task_group() as tasks:
        network.hold_control = True
        outcome = Outcome()
        buffer = bytearray(64)
        call = (lambda: fabric.register(buffer)) if how == "register" else (lambda: fabric.allocate(64))
        tasks.start_soon(outcome.run, call)
        await settled()
        outcome.scope.cancel()
        await settled()
        assert not outcome.ended, "INV-2: the engine may be pinning the buffer still"
        network.release()
        await settled()
        assert outcome.cancelled and fabric.statistics().regions == 0


async def test_mapped_files_and_regions_of_regions() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        with mmap.mmap(-1, 8192) as mapped:
            region = await fabric.register(mapped)
            assert region.length == 8192
            again = await fabric.register(memoryview(region)[:16])
            assert again.length == 16
            await again.release()
            await region.release()
            del region, again
            gc.collect()


async def test_a_region_cannot_be_made_by_hand() -> None:
    with pytest.raises(TypeError, match=r"fabric.register"):
        af.Region()
