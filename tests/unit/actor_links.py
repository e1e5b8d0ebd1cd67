"""Links for the tests of actors: the fake one and the real one, opened the same way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from asyncfabric.actors.link import Link
from asyncfabric.control.zmq_link import LinkConfig, open_link
from asyncfabric.testing.fake_link import FakeLinkNetwork

Opener = Callable[[str], AbstractAsyncContextManager[Link]]
KINDS = ("fake", "real")


def link_opener(kind: str, folder: Path) -> Opener:
    """Return what opens links of one kind that find each other."""
    network = FakeLinkNetwork()
    config = LinkConfig(window_bytes=2 << 20, listener_frames=4, ipc_folder=str(folder / "ipc"))

    @asynccontextmanager
    async def fake(name: str) -> AsyncIterator[Link]:
        link = network.link(name)
        yield link
        network.lose(link)

    @asynccontextmanager
    async def real(name: str) -> AsyncIterator[Link]:
        async with open_link(name, config=config) as link:
            yield link

    return fake if kind == "fake" else real
