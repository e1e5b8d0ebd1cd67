"""The directory's words as changes of the membership: one by one, and from a real directory over real links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from asyncfabric.actors import Identity
from asyncfabric.actors.directory_changes import labels_of, member_changes, member_of
from asyncfabric.actors.membership import Drains, Gone, Joined, Member, Membership
from asyncfabric.control.directory import Node, NodeChange
from asyncfabric.control.directory_client import DirectoryClient
from asyncfabric.control.directory_server import serve_directory
from asyncfabric.control.zmq_link import LinkConfig, open_link

A = Identity("a", 1)


def node(labels: dict[str, str] | None = None) -> Node:
    return Node(A, "decode", "ipc:///a", labels or {})


@pytest.mark.trio
async def test_each_kind_of_change() -> None:
    async def changes() -> AsyncIterator[NodeChange]:
        yield NodeChange(1, "joined", node(labels_of(b"\x00fabric\xff", 2.5)))
        yield NodeChange(2, "changed", node(labels_of(load=3.0)))
        yield NodeChange(3, "draining", node())
        yield NodeChange(4, "lost", node(), "no heartbeat")
        yield NodeChange(5, "left", node())

    assert [change async for change in member_changes(changes())] == [
        Joined(Member(A, "decode", "ipc:///a", b"\x00fabric\xff", 2.5)),
        Joined(Member(A, "decode", "ipc:///a", b"", 3.0)),
        Drains(A),
        Gone(A, "no heartbeat"),
        Gone(A, "left"),
    ]


@pytest.mark.parametrize("labels", [{"fabric": "not base64!"}, {"load": "much"}, {"load": "nan"}, {"load": "inf"}, {}])
def test_labels_that_make_no_sense_count_as_not_given(labels: dict[str, str]) -> None:
    assert member_of(node(labels)) == Member(A, "decode", "ipc:///a")


def test_labels_that_others_could_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 384 bytes, got 385"):
        labels_of(bytes(385))
    with pytest.raises(ValueError, match="finite"):
        labels_of(load=float("inf"))
    assert member_of(node(labels_of(bytes(384)))).fabric_address == bytes(384)


@pytest.mark.trio
async def test_a_real_directory_feeds_the_membership(tmp_path: Path) -> None:
    config = LinkConfig(ipc_folder=str(tmp_path / "ipc"))
    view = Membership()
    with trio.fail_after(30):
        async with (
            open_link("directory", config=config) as home,
            serve_directory(home),
            open_link("watcher", config=config) as link,
            DirectoryClient(link, home.address) as client,
            client.watch() as changes,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(view.follow, member_changes(changes))
            async with open_link("d1", config=config) as other, DirectoryClient(other, home.address) as its:
                await its.register("decode", other.address, labels_of(b"fabric", 1.0))
                (member,) = await view.wait_for("decode")
                assert member == Member(other.identity, "decode", other.address, b"fabric", 1.0)
                await its.drain()
                async for members in view.views():
                    if [one.state for one in members] == ["draining"]:
                        break
                await its.leave()
            async for members in view.views():
                if not members:
                    break
            nursery.cancel_scope.cancel()
