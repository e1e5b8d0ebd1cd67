"""Watch words and counter flags under kernels, streams and graphs, without torch: what compute-sanitizer runs.

Kernels by cupy. Ends with 0 when all was right.
"""

from __future__ import annotations

import anyio
import cupy
import numpy as np
from kernels import kernel

import asyncfabric as af

MIB = 1 << 20
PATTERN = 0x01020304
CONFIG = af.FabricConfig(rails=("cuda:0",))


async def _becomes(word: af.WatchWord, value: int) -> None:
    with anyio.fail_after(60):
        async for _, new in word:
            if new == value:
                return


async def main() -> None:
    """Play every way in which a kernel and a fabric signal each other."""
    wait, bump = kernel("wait_then_copy"), kernel("bump")
    stream = cupy.cuda.Stream(non_blocking=True)
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target, target.watch() as word:
        filler = await writer.allocate(MIB)
        np.frombuffer(filler.memory, np.int32)[:] = PATTERN
        source, exposed = await writer.allocate(MIB, device="cuda:0"), await target.allocate(MIB, device="cuda:0")
        await writer.write(filler, source.key(), 0)
        counter, key = target.counter(), exposed.key()
        out = cupy.zeros(MIB // 4, dtype=cupy.int32)
        cupy.cuda.Device().synchronize()
        with stream:
            wait((1,), (256,), (counter.flag_address, cupy.uint64(1), exposed._base, out.data.ptr, np.int32(MIB // 4)))
            bump((1,), (1,), (word.address, cupy.uint64(77)))
        assert word.value == 0
        await writer.write(source, key, 0, imm=counter.imm)
        await _becomes(word, 77)
        print("a kernel waited for a flag and stored to a word", flush=True)
        stream.synchronize()
        assert bool((out == PATTERN).all())
        counter.stream_wait(stream.ptr, 2)
        with stream:
            bump((1,), (1,), (word.address, cupy.uint64(78)))
        assert word.value == 77
        await writer.write(source, key, 0, imm=counter.imm)
        await _becomes(word, 78)
        print("a stream waited for a counter", flush=True)
        with stream:
            bump((1,), (1,), (word.address, cupy.uint64(79)))
        await writer.write(source, key, 0, after=stream.ptr)
        assert word.value == 79
        print("a write waited for a stream", flush=True)
        transfer = writer.write(source, key, 0, imm=counter.imm)
        await transfer
        with stream:
            stream.begin_capture()
            bump((1,), (1,), (word.address, cupy.uint64(80)))
            graph = stream.end_capture()
        graph.launch(stream)
        await _becomes(word, 80)
        print("a kernel of a graph stored to a word", flush=True)
        counter.close()


if __name__ == "__main__":
    anyio.run(main, backend="trio")
