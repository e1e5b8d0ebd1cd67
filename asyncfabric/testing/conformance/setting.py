"""What a check gets to work with: a FabricFactory, its capabilities, and memory with known bytes in it.

Everything random is seeded by the factory's name, so that a failure repeats. No pytest here: a missing capability is
`unittest.SkipTest`, which pytest and unittest both report as a skip with its reason.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from asyncfabric import Fabric, FabricAddress, Peer, Region, RegionKey, RegionSlice
from asyncfabric.testing.conformance.gpu_view import GpuView
from asyncfabric.types import AccessMode

MIB = 1 << 20
POISON = 0xA5  # what targets are filled with before anything is written
SCORCH = 0x5C  # what sources are overwritten with once nothing may read them any more

OpenFabric = Callable[[], AbstractAsyncContextManager[Fabric]]
Check = Callable[["FabricFactory"], Awaitable[None]]


@dataclass(frozen=True)
class FabricFactory:
    """How to open the fabrics under test, and what they can do.

    Attributes:
        open: opens one fabric, used with `async with`; called many times, all fabrics live in this process.
        open_target: opens the target side where it differs (another number of rails); None: the same as `open`.
        name: shown in the ids of tests.
        rails: rails of what `open` opens.
        memory: allocated (pages of the engine) or foreign (bytearrays, on a GPU tensors, of the caller).
        device: where the memory is: cpu, or cuda for the GPU of each fabric's own rail.
        peers: how many fabrics may live at once, for the checks with many peers.
        deep_write_bytes: size of each of the 8,192 writes of the deep queue; smaller for slow transports.
        big: try 5 GiB where the machine has the memory.
        deadline: seconds after which one check counts as hung.
    """

    open: OpenFabric
    open_target: OpenFabric | None = None
    name: str = "fabric"
    rails: int = 1
    memory: Literal["allocated", "foreign"] = "allocated"
    device: str = "cpu"
    peers: int = 256
    deep_write_bytes: int = MIB
    big: bool = False
    deadline: float = 30.0

    def target(self) -> AbstractAsyncContextManager[Fabric]:
        """Open the target side."""
        return (self.open_target or self.open)()


@dataclass
class Pair:
    """A writer and a target in one process, with memory of known bytes at both ends."""

    factory: FabricFactory
    writer: Fabric
    target: Fabric
    chance: random.Random

    async def source(self, length_bytes: int, *, access: AccessMode = "local") -> tuple[Region, bytes]:
        """Return a region of the writer with random bytes, and those bytes."""
        content = self.chance.randbytes(length_bytes)
        region = await memory_of(self.factory, self.writer, length_bytes, access)
        view_of(region)[:] = content
        return region, content

    async def poisoned(self, length_bytes: int, *, access: AccessMode = "read-write") -> tuple[Region, Any]:
        """Return a region of the target filled with POISON, and its memory."""
        region = await memory_of(self.factory, self.target, length_bytes, access)
        memory = view_of(region)
        memory[:] = bytes([POISON]) * length_bytes
        return region, memory

    async def peer(self) -> Peer:
        """Return the target as the writer's peer."""
        return await self.writer.connect(carried_address(self.target))


_IN_USE: WeakKeyDictionary[Fabric, list[Region]] = WeakKeyDictionary()
"""Regions that checks leave to their fabric: it gives them back when it closes, and nobody drops them before."""


async def memory_of(factory: FabricFactory, fabric: Fabric, length_bytes: int, access: AccessMode) -> Region:
    """Return a region of the kind of memory that the factory tests, on the GPU of the fabric's rail if on any."""
    device = "cpu" if factory.device == "cpu" else fabric.rails[0].device
    if factory.memory == "allocated":
        region = await fabric.allocate(length_bytes, device=device, access=access)
    elif device == "cpu":
        region = await fabric.register(bytearray(length_bytes), access=access)
    else:
        import torch

        tensor = torch.zeros(length_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        region = await fabric.register(tensor, access=access)
    return left_to(fabric, region)


def left_to(fabric: Fabric, region: Region) -> Region:
    """Return a region that nobody drops before its fabric closes."""
    _IN_USE.setdefault(fabric, []).append(region)
    return region


def view_of(region: Region) -> Any:
    """Return the bytes of a region, writable: a memoryview, or what looks like one for memory of a GPU."""
    return region.memory if region.device == "cpu" else GpuView(region)


def carried_key(region: Region | RegionSlice, **rights: Any) -> RegionKey:
    """Return the region's key as a peer gets it: through bytes."""
    return RegionKey.from_bytes(bytes(region.key(**rights)))


def carried_address(fabric: Fabric) -> FabricAddress:
    """Return the fabric's address as a peer gets it: through bytes."""
    return FabricAddress.from_bytes(bytes(fabric.address))


def assert_bytes(memory: Any, expected: bytes, what: str) -> None:
    """Compare and name the first difference; a plain assert would print megabytes."""
    got = bytes(memory)
    if got == expected:
        return
    assert len(got) == len(expected), f"{what}: {len(got)} bytes, expected {len(expected)}"
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    first = wrong[0]
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(got)} bytes differ, first at {first} (got {got[first]:#x}, "
        f"expected {expected[first]:#x}), last at {wrong[-1]}"
    )


def assert_untouched(memory: Any, what: str) -> None:
    """Check that nothing was written over the poison."""
    assert_bytes(memory, bytes([POISON]) * len(memory), what)


async def awaiting(transfer: Awaitable[object]) -> None:
    """Await a transfer as a task of its own.

    Cancellation: that of the transfer.
    """
    await transfer


async def cancelled_after(turns: int, calls: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Make each call as a task of its own, let all run for `turns` turns of the event loop, then cancel them.

    Returns when all have ended.

    Cancellation: that of the calls.
    """
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(call)
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds; the deadline of the check bounds it."""
    while not condition():  # noqa: ASYNC110  # statistics have no event to wait for
        await anyio.sleep(0.0005)


def skip(reason: str) -> NoReturn:
    """Skip the running check, loudly."""
    raise unittest.SkipTest(reason)


@asynccontextmanager
async def open_pair(factory: FabricFactory) -> AsyncIterator[Pair]:
    """Open a writer and a target."""
    async with factory.open() as writer, factory.target() as target:
        yield Pair(factory, writer, target, random.Random(factory.name))


@asynccontextmanager
async def open_many(factory: FabricFactory, count: int) -> AsyncIterator[list[Fabric]]:
    """Open `count` target-side fabrics."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(factory.target()) for _ in range(count)]


async def _bounded(check: Check, factory: FabricFactory) -> None:
    with anyio.fail_after(factory.deadline):
        await check(factory)


def run(check: Check, factory: FabricFactory, *, backend: str = "trio") -> None:
    """Run one check in an event loop of its own; raises AssertionError, SkipTest, or TimeoutError when it hangs."""
    try:
        anyio.run(partial(_bounded, check, factory), backend=backend)
    except BaseExceptionGroup as group:
        raise _single(group) from group


def _single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the only leaf of nested groups, so that a skip is a skip; otherwise the group itself."""
    leaf: BaseException = group
    while isinstance(leaf, BaseExceptionGroup) and len(leaf.exceptions) == 1:
        leaf = leaf.exceptions[0]
    return group if isinstance(leaf, BaseExceptionGroup) else leaf


def name_of(check: Check) -> str:
    """Return the name of a check for test ids."""
    return getattr(check, "__name__", "check").removeprefix("check_")
