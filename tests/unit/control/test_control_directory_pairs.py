"""Two directories over one store, and links of one process: nodes come over from one that ends, names hold for both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from asyncfabric import PeerError
from asyncfabric.control import Directory, DirectoryClient, Link, LinkConfig, MemoryStore, open_link, serve_directory

pytestmark = pytest.mark.anyio
PATIENCE_S = 15.0


class Two:
    """Two directories of one store; either can be ended."""

    def __init__(self, config: LinkConfig, folder: Path) -> None:
        self.config = config
        self.store = MemoryStore()
        self.places = [f"ipc://{folder}/d{number}.sock" for number in range(2)]
        self.served: list[Directory] = []
        self._scopes: list[anyio.CancelScope] = []
        self._ended = [anyio.Event(), anyio.Event()]

    @property
    def addresses(self) -> str:
        return ",".join(self.places)

    async def serve(self, number: int, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            async with (
                open_link(f"d{number}", bind=self.places[number], config=self.config) as link,
                serve_directory(link, store=self.store) as served,
            ):
                self.served.append(served)
                task_status.started()
                await anyio.sleep_forever()
        self._ended[number].set()

    async def end(self, number: int) -> None:
        self._scopes[number].cancel()
        await self._ended[number].wait()

    def holder(self, link: Link) -> int:
        """Return which directory holds the node of a link."""
        holds = {hold.node.identity: hold.directory for hold in self.served[0].table.image().holds}
        holder = holds[link.identity]
        assert holder is not None
        return int(holder.name[1:])

    @asynccontextmanager
    async def node(self, name: str, role: str = "", at: str = "") -> AsyncIterator[tuple[Link, DirectoryClient]]:
        async with (
            open_link(name, role=role, config=self.config) as link,
            DirectoryClient(link, at or self.addresses) as client,
        ):
            yield link, client


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    async with anyio.create_task_group() as tasks:
        made = Two(LinkConfig(ipc_folder=str(folder)), folder)
        for number in range(2):
            await tasks.start(made.serve, number)
        yield made
        tasks.cancel_scope.cancel()


async def until(condition: Any) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_nodes_come_over_from_a_directory_that_ends_and_nobody_sees_them_go(two: Two) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(two.node(f"n{number}")) for number in range(4)]
        for link, client in nodes:
            await client.register("role", link.address)
        for _, client in nodes:
            await until(lambda client=client: len(client.nodes()) == 4)
        assert {two.holder(link) for link, _ in nodes} == {0, 1}  # names spread over both
        epoch = two.served[1].table.epoch
        async with AsyncExitStack() as watching:
            streams = [await watching.enter_async_context(client.watch()) for _, client in nodes]
            for stream in streams:
                for _ in nodes:
                    with anyio.fail_after(PATIENCE_S):
                        assert (await stream.receive()).kind == "joined"
            moving = sum(two.holder(link) == 0 for link, _ in nodes)
            await two.end(0)
            await until(lambda: two.served[1].table.epoch == epoch + moving)
            await until(lambda: not any(client.missing for _, client in nodes))
            late = await stack.enter_async_context(two.node("late"))  # the first that it asks may be gone
            await late[1].register("role", late[0].address)
            for stream in streams:
                with anyio.fail_after(PATIENCE_S):
                    news = await stream.receive()
                assert news.node.identity == late[0].identity, "the first news since is the late node"


async def test_a_name_in_use_at_one_directory_is_in_use_at_the_other(two: Two) -> None:
    async with two.node("n", "prefill", two.places[0]) as (link, client):
        await client.register("prefill", link.address)
        await until(lambda: two.served[1].table.find(link.identity))
        async with two.node("n", "decode", two.places[1]) as (other, its):
            with pytest.raises(PeerError, match="in use by a prefill node"):
                await its.register("decode", other.address)
        assert two.served[1].table.find(link.identity) is not None


async def test_a_later_start_at_the_other_directory_replaces_a_node_for_good(two: Two) -> None:
    async with two.node("n", "decode", two.places[0]) as (link, client):
        await client.register("decode", link.address)
        async with two.node("n", "decode", two.places[1]) as (later, its):
            await its.register("decode", later.address)
            with anyio.fail_after(PATIENCE_S):
                assert "a later incarnation of its name" in await client.wait_refused()
            await until(lambda: two.served[0].table.find(later.identity))
            assert its.missing == ""
