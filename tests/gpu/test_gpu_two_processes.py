"""Two processes with GPU memory: on one GPU they share it, on a machine with more they take the first and the last."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest
from nvlink_fixture import ONE_LOOP
from party import Party

import asyncfabric as af

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ONE_LOOP)]

MIB = 1 << 20


def _random(torch: Any, length: int) -> tuple[Any, bytes]:
    content = torch.randint(0, 256, (length,), dtype=torch.uint8)
    return content, content.numpy().tobytes()


@pytest.mark.parametrize("foreign", [False, True], ids=["allocated", "torch"])
@pytest.mark.parametrize("source", ["allocated", "torch", "host"])
async def test_writes_reads_and_pages(far: int, foreign: bool, source: str) -> None:
    import torch

    length = 24 * MIB + 12345
    with Party(f"cuda:{far}", f"cuda:{far}", length, foreign=foreign) as peer:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            content, expected = _random(torch, length)
            if source == "host":
                region = await fabric.allocate(length)
                region.tensor(torch.uint8).copy_(content)
            elif source == "torch":
                tensor = content.to("cuda:0")
                torch.cuda.synchronize()
                region = await fabric.register(tensor)
            else:
                region = await fabric.allocate(length, device="cuda:0")
                region.tensor(torch.uint8).copy_(content)
                torch.cuda.synchronize()
            for begin, size in ((0, length), (1, 4095), (8191, 3 * MIB + 1), (7, 1)):
                assert await peer.asked("fill", 0xA5)
                await fabric.write(region[begin : begin + size], peer.key, begin, imm=peer.imm)
                got = await peer.asked("bytes", 0, length)
                assert got[begin : begin + size] == expected[begin : begin + size]
                assert got[:begin].strip(b"\xa5") == b"" and got[begin + size :].strip(b"\xa5") == b""
            assert await peer.asked("wait", 4) == 4
            assert await peer.asked("fill", 0xA5)
            page = 8192
            pages = torch.randperm(length // page)[:1000]
            targets = torch.randperm(length // page)[:1000]
            await fabric.write_pages(region, pages, peer.key, targets, page_bytes=page, imm=peer.imm)
            assert await peer.asked("wait", 1004) == 1004
            got = await peer.asked("bytes", 0, length)
            for a, b in zip(pages.tolist(), targets.tolist(), strict=True):
                assert got[b * page : (b + 1) * page] == expected[a * page : (a + 1) * page]
            back = await fabric.allocate(length, device="cuda:0" if source != "host" else "cpu")
            await fabric.read(peer.key, 0, back)
            assert back.tensor(torch.uint8).cpu().numpy().tobytes() == got


async def test_a_write_to_host_memory_of_the_peer(far: int) -> None:
    import torch

    with Party(f"cuda:{far}", "cpu", 16 * MIB) as peer:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            content, expected = _random(torch, 16 * MIB)
            tensor = content.to("cuda:0")
            torch.cuda.synchronize()
            region = await fabric.register(tensor)
            await fabric.write(region, peer.key, 0, imm=peer.imm)
            assert await peer.asked("wait", 1) == 1
            assert await peer.asked("bytes", 0, 16 * MIB) == expected


async def test_a_mapping_outlives_keys_and_ends_with_its_region(far: int) -> None:
    """Bytes land in the memory that a key is of, also when the next region has the slot and the address of the last."""
    import torch

    length = 64 * MIB
    with Party(f"cuda:{far}", f"cuda:{far}", length) as peer:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            region = await fabric.allocate(length, device="cuda:0")
            for number, word in enumerate(["revoke", "revoke", "renew", "revoke", "renew", "renew"]):
                key = af.RegionKey.from_bytes(await peer.asked(word))
                content, expected = _random(torch, length)
                region.tensor(torch.uint8).copy_(content)
                torch.cuda.synchronize()
                assert await peer.asked("fill", 0xA5)
                await fabric.write(region, key, 0, imm=peer.imm)
                assert await peer.asked("wait", number + 1) == number + 1
                assert await peer.asked("bytes", 0, length) == expected


async def test_a_revoked_key_writes_nothing(far: int) -> None:
    import torch

    with Party(f"cuda:{far}", f"cuda:{far}", 64 * MIB) as peer:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            region = await fabric.allocate(64 * MIB, device="cuda:0")
            region.tensor(torch.uint8).fill_(7)
            torch.cuda.synchronize()
            flood = [fabric.write(region, peer.key, 0) for _ in range(20)]
            fresh = await peer.asked("revoke")
            assert await peer.asked("fill", 0xA5)
            for transfer in flood:
                try:
                    await transfer
                except af.StaleKeyError:
                    continue
            assert await peer.asked("bytes", 0, 64 * MIB) == b"\xa5" * (64 * MIB), "a write landed after the revocation"
            await fabric.write(region[:MIB], af.RegionKey.from_bytes(fresh), 0)
            assert await peer.asked("bytes", 0, MIB) == b"\7" * MIB


async def test_a_killed_peer_is_named_and_harms_no_gpu(far: int) -> None:
    import torch

    with Party(f"cuda:{far}", f"cuda:{far}", 256 * MIB) as peer:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            region = await fabric.allocate(256 * MIB, device="cuda:0")
            await fabric.write(region, peer.key, 0)
            flood = [fabric.write(region, peer.key, 0) for _ in range(200)]
            peer.process.kill()
            killed = time.monotonic()
            with anyio.fail_after(20):
                outcomes = []
                for transfer in flood:
                    try:
                        await transfer
                    except af.PeerError as error:
                        outcomes.append(error)
            assert outcomes, "200 writes of 256 MiB ended before the kill: the test shows nothing"
            assert time.monotonic() - killed < 1
            tensor = region.tensor(torch.uint8)
            tensor.fill_(3)
            assert int(tensor[:1000].sum()) == 3000, "the survivor's GPU works"
            await region.release()
