"""A directory and its clients over links of one process: joining, changing, leaving, and who is lost and why."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from links_anew import begin_anew, send_at_once

from asyncfabric.control import DirectoryClient, LinkConfig, open_link, serve_directory
from asyncfabric.control.directory_messages import (
    FROM_DIRECTORY,
    TO_DIRECTORY,
    Changes,
    News,
    Register,
    Registered,
    Snapshot,
    Unregistered,
    WatchFrom,
    decode_news,
    encode,
)
from asyncfabric.control.messages import ENVELOPE_BYTES

pytestmark = pytest.mark.anyio
PATIENCE_S = 10.0


def named(news: News | None) -> str:
    """Return the labels that news of nodes have, as text."""
    match news:
        case Snapshot(_, _, nodes):
            labels = [node.labels for node in nodes]
        case Changes(changes):
            labels = [change.node.labels for change in changes]
        case _:
            labels = []
    return json.dumps(labels)


async def until(changes: Any, kind: str, name: str) -> Any:
    """Return the first change of this kind about this node."""
    async for change in changes:
        if (change.kind, change.node.identity.name) == (kind, name):
            return change
    raise AssertionError("the watch ended")


@pytest.fixture
def config(tmp_path: Path) -> LinkConfig:
    return LinkConfig(ipc_folder=str(tmp_path / "s"))


async def test_nodes_join_change_drain_and_leave_before_the_eyes_of_all(config: LinkConfig) -> None:
    async with open_link("d", config=config) as d, open_link("n", config=config) as n, serve_directory(d) as served:
        embedded, client = DirectoryClient(d, d.address), DirectoryClient(n, d.address)
        async with embedded, client, embedded.watch() as changes:
            await embedded.register("directory", d.address)
            await client.register("prefill", n.address, {"zone": "b"})
            joined = await until(changes, "joined", "n")
            assert joined.node.identity == n.identity and joined.node.labels == {"zone": "b"}
            assert [node.identity for node in embedded.nodes("prefill")] == [n.identity]
            await client.register("prefill", n.address, {"zone": "c"})
            assert (await until(changes, "changed", "n")).node.labels == {"zone": "c"}
            await client.drain()
            await until(changes, "draining", "n")
            assert embedded.nodes(state="ready") == embedded.nodes("directory")
            await client.leave()
            assert (await until(changes, "left", "n")).epoch == served.table.epoch
            assert client.is_connected and embedded.nodes("prefill") == []


async def test_a_peer_that_takes_less_than_the_directory_holds_ends_nothing(config: LinkConfig) -> None:
    small = replace(config, max_frame_bytes=2 * ENVELOPE_BYTES, window_bytes=8 * ENVELOPE_BYTES)
    async with (
        open_link("d", config=config) as d,
        open_link("n", config=config) as n,
        open_link("s", config=small) as s,
        serve_directory(d),
        DirectoryClient(n, d.address) as client,
        client.watch() as changes,
    ):
        await client.register("prefill", n.address, {f"{number}": "x" * 500 for number in range(5)})
        async with DirectoryClient(s, d.address) as narrow:
            await narrow.register("decode", s.address)  # it is in, and has no view
            await until(changes, "joined", "s")
        await s.disconnect(d.identity)
        await until(changes, "lost", "s")


async def test_a_lost_session_is_a_lost_node_long_before_its_lease_ends(config: LinkConfig) -> None:
    async with open_link("d", config=config) as d, serve_directory(d, lease_ns=3_600_000_000_000):
        embedded = DirectoryClient(d, d.address)
        async with embedded, embedded.watch() as changes:
            async with open_link("n", config=config) as n, DirectoryClient(n, d.address) as client:
                await client.register("prefill", n.address)
            assert (await until(changes, "lost", "n")).reason == "left"


async def test_who_came_back_before_the_directory_looked_is_reported_further(config: LinkConfig) -> None:
    """What it sent in its new session went to a watcher that ended with the old one: it reached nobody any more."""
    watch = encode(WatchFrom(0))
    async with (
        open_link("d", config=config) as d,
        open_link("n", config=config) as n,
        serve_directory(d),
        DirectoryClient(d, d.address) as embedded,
        n.listen(FROM_DIRECTORY) as reported,
    ):
        await n.connect(d.address)
        for number in range(16):  # whether it answers or looks for losses first is the event loop's choice
            await n.send(d.identity, TO_DIRECTORY, watch)
            await reported.receive()
            begin_anew(n, d)
            send_at_once(n, d, TO_DIRECTORY, watch)
            await embedded.register("directory", d.address, {"number": str(number)})
            with anyio.fail_after(PATIENCE_S):
                while f'"{number}"' not in named(decode_news((await reported.receive()).body)):
                    pass


async def test_who_was_in_and_came_back_before_the_directory_looked_is_asked_to_register_again(
    config: LinkConfig,
) -> None:
    async with (
        open_link("d", config=config) as d,
        open_link("n", config=config) as n,
        serve_directory(d),
        n.listen(FROM_DIRECTORY) as reported,
    ):
        await n.connect(d.address)
        request = encode(Register("prefill", n.address, {}))
        await n.send(d.identity, TO_DIRECTORY, request)
        assert isinstance(decode_news((await reported.receive()).body), Registered)
        begin_anew(n, d)
        send_at_once(n, d, TO_DIRECTORY, request)
        with anyio.fail_after(PATIENCE_S):
            while not isinstance(news := decode_news((await reported.receive()).body), Unregistered):
                pass
        assert news.again and "its session was lost" in news.reason


async def test_a_node_waits_for_a_directory_that_starts_later(config: LinkConfig, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    where = f"ipc://{folder}/d.sock"
    async with (
        open_link("n", config=config) as n,
        DirectoryClient(n, where) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(client.register, "decode", n.address)
        async with open_link("d", bind=where, config=config) as d, serve_directory(d) as served:
            async with client.watch() as changes:
                assert (await until(changes, "joined", "n")).node.role == "decode"
            assert served.table.find(n.identity) is not None


async def test_misuse_and_requests_that_cannot_be_read(config: LinkConfig) -> None:
    async with open_link("d", config=config) as d, open_link("n", config=config) as n:
        with pytest.raises(ValueError, match="lease_ns"):
            await serve_directory(d, lease_ns=1).__aenter__()
        async with serve_directory(d) as served, DirectoryClient(n, d.address) as client:
            with pytest.raises(ValueError, match="at most 64"):
                await client.register("x", n.address, {f"{number}": "" for number in range(65)})
            with pytest.raises(ValueError, match="role"):
                await client.register("", n.address)
            await n.connect(d.address)
            await n.send(d.identity, "directory", b"garbage")
            await client.register("x", n.address)
            assert served.unreadable == 1


async def test_news_that_a_client_takes_while_it_ends_finds_nobody_to_notify(config: LinkConfig) -> None:
    async with open_link("d", config=config) as d, open_link("n", config=config) as n, serve_directory(d):
        client = DirectoryClient(n, d.address)
        async with AsyncExitStack() as watching:
            async with client:
                await client.register("prefill", n.address)
                changes = await watching.enter_async_context(client.watch())
                await until(changes, "joined", "n")
            # What its reader does when it was woken with news just before it was cancelled.
            await client._take(d.identity, Snapshot(99, True, []))
            with pytest.raises(anyio.EndOfStream):
                await changes.receive()


async def test_a_session_that_ends_behind_news_that_want_an_answer_is_begun_anew(config: LinkConfig) -> None:
    """A node was ended by it: its lease had run out while it stood still, and then its session had too."""
    async with (
        open_link("d", config=config) as d,
        open_link("n", config=config) as n,
        serve_directory(d) as served,
        DirectoryClient(n, d.address) as client,
        DirectoryClient(d, d.address) as embedded,
        embedded.watch() as changes,
    ):
        await client.register("prefill", n.address)
        await until(changes, "joined", "n")
        await served._shared.decide(lambda table: table.leave(n.identity))
        await d.send(n.identity, FROM_DIRECTORY, encode(Unregistered("the lease ended", True)))
        await d.disconnect(n.identity)
        with anyio.fail_after(PATIENCE_S):
            await until(changes, "joined", "n")
