"""Fabrics over fake engines for the tests of the public API: opened, with memory and a key, in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

import asyncfabric as af
from asyncfabric.testing import FakeEngine, FakeNetwork

LENGTH = 1 << 16


@dataclass
class Pair:
    """A writer, a reader, the network between them, and memory on both sides."""

    network: FakeNetwork
    writer: af.Fabric
    reader: af.Fabric
    source: af.Region
    target: af.Region
    key: af.RegionKey


def open_fake(network: FakeNetwork, config: af.FabricConfig | None = None) -> Any:
    """Return an opening of a fabric over a fake engine."""
    return af.open_fabric(config, engine_factory=lambda wanted: FakeEngine(wanted, network))


@asynccontextmanager
async def open_pair(config: af.FabricConfig | None = None, **network: Any) -> AsyncIterator[Pair]:
    """Open two fabrics; the network begins to hold only after the set-up."""
    hold = network.pop("hold", False)
    net = FakeNetwork(**network)
    async with open_fake(net, config) as reader, open_fake(net, config) as writer:
        source, target = await writer.allocate(LENGTH), await reader.allocate(LENGTH)
        source.memory[:] = bytes(range(256)) * (LENGTH // 256)
        await writer.connect(reader.address)
        net.hold = hold
        try:
            yield Pair(net, writer, reader, source, target, target.key())
        finally:
            net.release()


class Outcome:
    """How a call in a task of its own ended: `value`, `error`, or `cancelled`; `scope` cancels it."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.value: Any = None
        self.error: Exception | None = None
        self.cancelled = False
        self.ended = False

    async def run(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Await the call."""
        with self.scope:
            try:
                self.value = await call()
            except Exception as error:
                self.error = error
            except BaseException:
                self.cancelled = True
                raise
            finally:
                self.ended = True


async def settled() -> None:
    """Return when every task sleeps and no readable fd is left to wake one.

    wait_all_tasks_blocked of asyncio does not look at fds, so the loop gets a few turns first.
    """
    for _turn in range(8):
        await checkpoint()
    await anyio.wait_all_tasks_blocked()


async def waiting_for(value: Awaitable[Any]) -> Any:
    """Await a value; as a coroutine, for task groups."""
    return await value
