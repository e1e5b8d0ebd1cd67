"""A measured process whose region is on a GPU; torch fills it and looks at it, the fabric moves it."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
import trio

import asyncfabric as af
from asyncfabric.bench.pattern import Bytes
from asyncfabric_services.bench.gpu.kernel import EchoKernel
from asyncfabric_services.bench.transfers.fabric_worker import FabricWorker, MemoryKind
from asyncfabric_services.bench.worker import config_of

FIRST_KERNELS = 200
"""Rounds that are not counted: clocks and caches of an idle GPU."""

CHECKPOINT_EVERY = 16


class GpuWorker(FabricWorker):
    """One fabric with one rail, `cuda:N`; "cuda:last" is the last GPU that this process sees."""

    _tensor: torch.Tensor
    _config: dict[str, Any]

    async def do_open(self, config: dict[str, Any]) -> dict[str, Any]:
        """Open the fabric; return its address and what its rail is."""
        if not torch.cuda.is_available():
            raise af.DeviceError("torch sees no GPU", remedy="install torch with CUDA; see asyncfabric doctor")
        last = torch.cuda.device_count() - 1
        self._config = config | {"rails": [rail.replace(":last", f":{last}") for rail in config["rails"]]}
        return await super().do_open(self._config)

    async def do_memory(self, kind: MemoryKind, length_bytes: int, seed: int | None) -> str:
        """Make a region on the GPU of the rail, or of the host when `kind` is "host"; see FabricWorker."""
        device = self._fabric.rails[0].device
        if kind == "host":
            self._region = await self._fabric.allocate(length_bytes)
            self._tensor = torch.frombuffer(self._region.memory, dtype=torch.uint8)
        elif kind == "allocated":
            self._region = await self._fabric.allocate(length_bytes, device=device)
            self._tensor = self._region.tensor(torch.uint8)
        else:
            self._tensor = torch.empty(length_bytes, dtype=torch.uint8, device=device)
            self._region = await self._fabric.register(self._tensor)
        await (self.do_poison() if seed is None else self.do_fill(seed))
        return bytes(self._region.key()).hex()

    @property
    def memory_bytes(self) -> int:
        """Return how long the region is."""
        return self._tensor.numel()

    def content(self) -> Bytes:
        """Return a copy of what the region holds."""
        found: Bytes = self._tensor.cpu().numpy()
        return found

    def put(self, content: Bytes | int) -> None:
        """Fill the region, and wait for the GPU."""
        if isinstance(content, int):
            self._tensor.fill_(content)
        else:
            self._tensor.copy_(torch.from_numpy(content))
        if self._tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.device)

    async def do_bare_echo(self, count: int) -> list[int]:
        """Store a word, wait for the kernel's answer, in a bare loop; return round trips in ns."""
        words = torch.zeros(16, dtype=torch.int64).pin_memory()
        go, back = (ctypes.c_uint64.from_address(words.data_ptr() + offset) for offset in (0, 64))
        stream = self._echoing(words.data_ptr(), words.data_ptr() + 64, count)
        samples = []
        for number in range(1, count + 1):
            begin = time.perf_counter_ns()
            go.value = number
            while back.value < number:
                pass
            samples.append(time.perf_counter_ns() - begin)
        stream.synchronize()
        return samples[FIRST_KERNELS:]

    async def do_watch_task(self, count: int) -> list[int]:
        """Store a word; a kernel stores it to a watch word, which this task awaits. Return round trips in ns."""
        async with self._fabric.watch() as word, self._fabric.watch() as go:
            starter = ctypes.c_uint64.from_address(go.address)
            stream = self._echoing(go.address, word.address, count)
            samples = []
            for number in range(1, count + 1):
                if number % CHECKPOINT_EVERY == 0:
                    await trio.lowlevel.checkpoint()
                begin = time.perf_counter_ns()
                starter.value = number
                async for _, new in word:
                    if new >= number:
                        break
                samples.append(time.perf_counter_ns() - begin)
            stream.synchronize()
        return samples[FIRST_KERNELS:]

    async def do_watch_write(self, count: int) -> list[int]:
        """Store a word; a kernel stores it to a watch word, which sets off a write of 8 bytes to another fabric here.

        Return the times until the bytes are seen, in ns: no event loop is in between.
        """
        async with (
            af.open_fabric(config_of(self._config)) as target,
            self._fabric.watch() as word,
            self._fabric.watch() as go,
        ):
            source, exposed = await self._fabric.allocate(8 * (count + 1)), await target.allocate(8)
            np.frombuffer(source.memory, dtype=np.uint64)[:] = np.arange(count + 1)
            seen = ctypes.c_uint64.from_buffer(exposed.memory)
            key = exposed.key(access="write")
            await self._fabric.write(source[:8], key, 0)
            starter = ctypes.c_uint64.from_address(go.address)
            stream = self._echoing(go.address, word.address, count)
            samples = []
            for number in range(1, count + 1):
                transfer = self._fabric.write(source[8 * number : 8 * number + 8], key, 0, after=word.reaches(number))
                begin = time.perf_counter_ns()
                starter.value = number
                while seen.value != number:
                    pass
                samples.append(time.perf_counter_ns() - begin)
                await transfer
            stream.synchronize()
            del seen
        return samples[FIRST_KERNELS:]

    async def do_signal_kernel(self, count: int) -> list[int]:
        """Signal a fabric here whose counter's flag a kernel spins on, and wait for its answer; return times in ns."""
        async with af.open_fabric(config_of(self._config)) as target:
            counter = target.counter()
            peer = await self._fabric.connect(target.address)
            words = torch.zeros(8, dtype=torch.int64).pin_memory()
            back = ctypes.c_uint64.from_address(words.data_ptr())
            stream = self._echoing(counter.flag_address, words.data_ptr(), count)
            samples = []
            for number in range(1, count + 1):
                begin = time.perf_counter_ns()
                transfer = self._fabric.signal(peer, counter.imm)
                while back.value < number:
                    pass
                samples.append(time.perf_counter_ns() - begin)
                await transfer
            stream.synchronize()
        return samples[FIRST_KERNELS:]

    def _echoing(self, flag: int, word: int, rounds: int) -> torch.cuda.Stream:
        """Start the kernel that answers; return its stream."""
        device = self._fabric.rails[0].device
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the context is current
            kernel = EchoKernel()
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            kernel.start(flag, 1, word, rounds, stream.cuda_stream)
        return stream
