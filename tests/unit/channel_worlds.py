"""Worlds of channels: the same members over each carrier, in one process. A node is a task that ends when it is killed.

Links go over ipc sockets, stores over one HashStore, fabrics over the local provider. Those of "store+fabric"
have so little room that parts of long messages go through the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

import asyncfabric as af
from asyncfabric.control import (
    Codec,
    DirectoryClient,
    FabricChannels,
    LinkChannels,
    LinkConfig,
    LocalChannels,
    MemberChannel,
    StoreChannels,
    open_link,
    serve_directory,
)
from asyncfabric.errors import ClosedError, RemoteProtocolError

NAMES = ("a", "b", "c")
SILENCE_S = 0.6
"""After which a store's members are lost."""


class Note(msgspec.Struct, frozen=True):
    """A message of these tests."""

    number: int
    data: bytes = b""


BAD = Note(-1)
"""Its bytes are no message for whoever receives them."""


def _decode(data: bytes) -> Note:
    note = msgspec.msgpack.decode(data, type=Note)
    if note.number < 0:
        raise RemoteProtocolError("a bad note")
    return note


CODEC = Codec(msgspec.msgpack.encode, _decode)
Channel = MemberChannel[Note]


class World:
    """Opens members, each on a node of its own, and kills nodes."""

    def __init__(self, window: int, nursery: trio.Nursery) -> None:
        self.window = window
        self.nursery = nursery
        self._stops: dict[str, tuple[trio.CancelScope, trio.Event]] = {}

    async def open(self, name: str) -> Channel:
        """Open a member on a new node."""
        channel: Channel = await self.nursery.start(self._live, name)
        return channel

    async def kill(self, name: str) -> None:
        """End a node without a farewell of its member."""
        scope, ended = self._stops.pop(name)
        scope.cancel()
        await ended.wait()

    async def _live(self, name: str, *, task_status: Any) -> None:
        ended = trio.Event()
        try:
            with trio.CancelScope() as scope:
                self._stops[name] = scope, ended
                async with self.node(name) as channel:
                    task_status.started(channel)
                    await trio.sleep_forever()
        finally:
            ended.set()

    def node(self, name: str) -> Any:
        """Hold a node with one member open."""
        raise NotImplementedError


class LocalWorld(World):
    """All in one LocalChannels."""

    def __init__(self, window: int, nursery: trio.Nursery) -> None:
        super().__init__(window, nursery)
        self._channels = LocalChannels(CODEC, window=window)

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[Channel]:
        channel = self._channels.open(name)
        try:
            yield channel
        finally:
            if not channel._ended:
                self._channels.close(name, "killed")


class LinkWorld(World):
    """A link for each node."""

    folder: Path
    directory: str

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[Channel]:
        async with (
            open_link(name, config=LinkConfig(ipc_folder=str(self.folder))) as link,
            DirectoryClient(link, self.directory) as client,
            trio.open_nursery() as nursery,
        ):
            channels = LinkChannels(link, CODEC, window=self.window)
            channel = channels.open(name)
            nursery.start_soon(channels.run, client, ("node",))
            await client.register("node", link.address, {})
            yield channel
            nursery.cancel_scope.cancel()


class StoreWorld(World):
    """One store for all nodes, and perhaps a fabric for each."""

    store: Any
    fabrics: af.FabricConfig | None = None

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[Channel]:
        channels = StoreChannels(self.store, CODEC, window=self.window, deadline_s=SILENCE_S)
        async with AsyncExitStack() as stack:
            if self.fabrics is not None:
                channels.use_fabric(await stack.enter_async_context(af.open_fabric(self.fabrics)))
            nursery = await stack.enter_async_context(trio.open_nursery())
            channel = await channels.open(name)
            nursery.start_soon(channels.run)
            yield channel
            nursery.cancel_scope.cancel()


class FabricWorld(World):
    """A fabric for each node; all have an address before the first is used."""

    addresses: dict[str, af.FabricAddress]
    fabrics: dict[str, af.Fabric]

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[Channel]:
        fabric = self.fabrics[name]
        channels = FabricChannels(fabric, CODEC, self.addresses, window=self.window)

        async def run() -> None:
            with suppress(ClosedError):  # as `run` promises, where the fabric's end comes before the cancellation
                await channels.run()

        async with trio.open_nursery() as nursery:
            channel = channels.open(name)
            nursery.start_soon(run)
            try:
                yield channel
            finally:
                with trio.CancelScope(shield=True):
                    await fabric.aclose()
            nursery.cancel_scope.cancel()


KINDS = ("local", "link", "store", "store+fabric", "fabric")


@asynccontextmanager
async def _world(kind: str, window: int, folder: Path) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        if kind == "local":
            yield LocalWorld(window, nursery)
        elif kind == "link":
            links = LinkWorld(window, nursery)
            async with open_link("directory", config=LinkConfig(ipc_folder=str(folder))) as link, serve_directory(link):
                links.folder, links.directory = folder, link.address
                yield links
                nursery.cancel_scope.cancel()
        elif kind.startswith("store"):
            distributed = pytest.importorskip("torch.distributed", reason="stores need torch")
            stores = StoreWorld(window, nursery)
            stores.store = distributed.HashStore()
            if kind == "store+fabric":
                stores.fabrics = af.FabricConfig(rails=("local",), max_ops=8)
            yield stores
            nursery.cancel_scope.cancel()
        else:
            fabrics = FabricWorld(window, nursery)
            config = af.FabricConfig(rails=("local",), peer_deadline_host=2.0)
            async with (
                af.open_fabric(config) as one,
                af.open_fabric(config) as other,
                af.open_fabric(config) as third,
            ):
                fabrics.fabrics = dict(zip(NAMES, (one, other, third), strict=True))
                fabrics.addresses = {name: each.address for name, each in fabrics.fabrics.items()}
                yield fabrics
                nursery.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def in_world(kind: str, folder: Path, test: Callable[[World], Awaitable[None]], window: int = 64) -> None:
    """Run a test's body in a world of a kind, for at most a minute."""

    async def main() -> None:
        with trio.fail_after(60):
            async with _world(kind, window, folder) as world:
                await test(world)

    trio.run(main)
