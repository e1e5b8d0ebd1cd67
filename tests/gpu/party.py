"""The other process of a test: a fabric with one region on a GPU, driven over a pipe by a parent that knows its key."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
from preloaded import PRELOADED

import asyncfabric as af


def expandable_segments(on: bool) -> None:
    """Turn expandable segments of torch's allocator on or off."""
    import torch

    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    torch.cuda.empty_cache()
    settings(f"expandable_segments:{on}")


async def _serve(pipe: Connection, rail: str, device: str, length_bytes: int, foreign: bool, expandable: bool) -> None:
    import torch

    if expandable:
        expandable_segments(True)

    config = af.FabricConfig(rails=(rail,), polling="busy")
    async with af.open_fabric(config) as fabric:
        if foreign:
            padding = torch.zeros(4096, dtype=torch.uint8, device=device)  # so that the region is inside an allocation
            tensor = torch.zeros(length_bytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            region = await fabric.register(tensor)
            assert padding is not None
        else:
            region = await fabric.allocate(length_bytes, device=device)
        counter = fabric.counter()
        pipe.send((bytes(fabric.address), bytes(region.key()), counter.imm))
        while True:
            word, *arguments = await anyio.to_thread.run_sync(pipe.recv)
            if word == "stop":
                return
            if word == "wait":
                pipe.send(await counter.wait(*arguments))
            elif word == "bytes":
                begin, end = arguments
                if device == "cpu":
                    pipe.send(bytes(region.memory[begin:end]))
                else:
                    pipe.send(region[begin:end].tensor(torch.uint8).cpu().numpy().tobytes())
            elif word == "fill":
                view = (
                    torch.frombuffer(region.memory, dtype=torch.uint8)
                    if device == "cpu"
                    else region.tensor(torch.uint8)
                )
                view.fill_(arguments[0])
                torch.cuda.synchronize(rail)
                pipe.send(True)
            elif word == "renew":
                await region.release()
                region = await fabric.allocate(length_bytes, device=device)
                pipe.send(bytes(region.key()))
            elif word == "revoke":
                await region.revoke()
                pipe.send(bytes(region.key()))


def _main(pipe: Connection, *arguments: Any) -> None:
    anyio.run(functools.partial(_serve, pipe, *arguments), backend="trio")


class Party:
    """A peer process, used with `with`; `key` and `address` are those of its region and fabric."""

    def __init__(
        self, rail: str, device: str, length_bytes: int, *, foreign: bool = False, expandable: bool = False
    ) -> None:
        self._pipe, self._theirs = PRELOADED.Pipe()
        self.process = PRELOADED.Process(
            target=_main, args=(self._theirs, rail, device, length_bytes, foreign, expandable), daemon=True
        )

    def __enter__(self) -> Party:
        self.process.start()
        self._theirs.close()
        address, key, self.imm = self._answer()
        self.address = af.FabricAddress.from_bytes(address)
        self.key = af.RegionKey.from_bytes(key)
        return self

    def __exit__(self, *about: object) -> None:
        with contextlib.suppress(OSError):  # a peer that was killed receives nothing
            self._pipe.send(("stop",))
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self._pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(120), "the peer process did not answer"
        return self._pipe.recv()

    def ask(self, *words: Any) -> Any:
        """Ask and wait for the answer; blocks the thread."""
        self._pipe.send(words)
        return self._answer()

    async def asked(self, *words: Any) -> Any:
        """Ask without blocking the loop.

        Cancellation: the answer is lost; do not ask again.
        """
        call: Callable[[], Any] = functools.partial(self.ask, *words)
        return await anyio.to_thread.run_sync(call)
