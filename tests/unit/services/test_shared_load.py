"""Routers share what they assigned: choices follow the sum, and the share of one that is gone is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from asyncfabric.actors import Gone, Identity, Joined, Member, Membership
from asyncfabric.control import Link, LinkConfig, open_link
from asyncfabric_services.router.shared_load import CHANNEL, ROLE, share_load

pytestmark = pytest.mark.trio
PATIENCE_S = 15.0
NODES = [Identity(name, 1) for name in "abc"]


@asynccontextmanager
async def router(name: str, folder: Path) -> AsyncIterator[tuple[Link, Membership]]:
    """Run what a router does with loads; it knows the decode nodes, and routers that are joined to it."""
    membership = Membership()
    for node in NODES:
        membership.apply(Joined(Member(node, "decode")))
    config = LinkConfig(ipc_folder=str(folder))
    async with open_link(name, role=ROLE, config=config) as link, trio.open_nursery() as nursery:
        nursery.start_soon(share_load, link, membership)
        yield link, membership
        nursery.cancel_scope.cancel()


def join(link: Link, *memberships: Membership) -> None:
    for membership in memberships:
        membership.apply(Joined(Member(link.identity, ROLE, link.address)))


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def order(membership: Membership) -> str:
    return "".join(member.identity.name for member in membership.by_load("decode"))


async def test_choices_avoid_what_another_router_loaded_until_it_is_gone(tmp_path: Path) -> None:
    async with (
        router("r1", tmp_path / "s") as (first, its),
        router("r2", tmp_path / "s") as (second, other),
        router("r3", tmp_path / "s") as (third, late),
    ):
        join(first, its, other)
        join(second, its, other)
        with ExitStack() as requests:
            for node in (NODES[0], NODES[0], NODES[1]):
                requests.enter_context(its.assigned(node))
            await until(lambda: order(other) == "cba")
            assert other.assigned_to(NODES[0]) == 0  # counted apart from its own
            with other.assigned(NODES[2]), other.assigned(NODES[2]):
                await until(lambda: order(its) == "bac" and order(other) == "bac")
            await until(lambda: order(its) == order(other) == "cba")
            join(third, its, late)
            join(first, late)
            await until(lambda: order(late) == "cba")  # one that comes later is sent the present state
            other.apply(Gone(first.identity, "lost"))
            assert order(other) == "abc"
            join(first, other)
            assert order(other) == "cba"
        await until(lambda: order(other) == order(late) == "abc")


async def test_shares_of_others_than_routers_and_garbage_count_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        router("r1", tmp_path / "s") as (link, membership),
        open_link("d", role="decode", config=LinkConfig(ipc_folder=str(tmp_path / "s"))) as node,
        open_link("r2", role=ROLE, config=LinkConfig(ipc_folder=str(tmp_path / "s"))) as peer,
    ):
        for sender, body, reported in ((node, b"\x91\x90", "is no router"), (peer, b"garbage", "cannot be read")):
            join(sender, membership)
            await sender.connect(link.address)
            await sender.send(link.identity, CHANNEL, body)
            await until(lambda reported=reported: reported in caplog.text)
        assert order(membership) == "abc"
