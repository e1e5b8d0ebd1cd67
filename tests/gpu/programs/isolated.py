"""One end of a test between processes that see one GPU each: `python isolated.py write|hold LENGTH`, lines of JSON.

Environment: CUDA_VISIBLE_DEVICES, as launchers of inference engines set it for each worker.
"""

from __future__ import annotations

import json
import sys

import anyio

import asyncfabric as af


def _send(**words: object) -> None:
    print(json.dumps(words), flush=True)


def _receive() -> dict[str, str]:
    found: dict[str, str] = json.loads(sys.stdin.readline())
    return found


def _content(length: int) -> bytes:
    return bytes(range(251)) * (length // 251 + 1)


async def hold(length: int) -> None:
    """Own the memory: report its key, and state what it has when asked."""
    import torch

    async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
        region = await fabric.register(torch.zeros(length, dtype=torch.uint8, device="cuda:0"))
        ours = await fabric.allocate(length, device="cuda:0")
        _send(gpus=torch.cuda.device_count(), registered=bytes(region.key()).hex(), allocated=bytes(ours.key()).hex())
        await anyio.to_thread.run_sync(_receive)
        wanted = _content(length)[:length]
        found = [each.tensor(torch.uint8).cpu().numpy().tobytes() == wanted for each in (region, ours)]
        _send(right=found)
        await anyio.to_thread.run_sync(_receive)


async def write(length: int) -> None:
    """Write to both regions of the other process, and read back."""
    import torch

    async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
        source = await fabric.allocate(length, device="cuda:0")
        source.tensor(torch.uint8).copy_(torch.frombuffer(bytearray(_content(length)[:length]), dtype=torch.uint8))
        torch.cuda.synchronize()
        keys = await anyio.to_thread.run_sync(_receive)
        back = await fabric.allocate(length, device="cuda:0")
        for name in ("registered", "allocated"):
            key = af.RegionKey.from_bytes(bytes.fromhex(keys[name]))
            await fabric.write(source, key, 0)
            await fabric.read(key, 0, back)
            assert torch.equal(back.tensor(torch.uint8), source.tensor(torch.uint8)), name
        _send(gpus=torch.cuda.device_count(), written=True)


if __name__ == "__main__":
    anyio.run(write if sys.argv[1] == "write" else hold, int(sys.argv[2]), backend="trio")
