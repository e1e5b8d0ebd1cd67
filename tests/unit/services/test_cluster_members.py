"""When a node counts as gone from the view of the cluster: after it was seen, in whatever way it went."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from asyncfabric.actors import Drains, Gone, Identity, Joined, Member, Membership

trio_services = pytest.importorskip("asyncfabric_services.nodes.members", reason="the services need their extra")

pytestmark = pytest.mark.trio
SOURCE, OTHER = b"source", b"other"


def joined(name: str, incarnation: int, fabric: bytes) -> Joined:
    return Joined(Member(Identity(name, incarnation), "prefill", fabric_address=fabric))


async def test_a_node_is_gone_when_it_was_in_and_is_not(autojump_clock: trio.testing.MockClock) -> None:
    view, reported = Membership(), trio.Event()

    async def wait() -> None:
        await trio_services.until_gone(view, SOURCE)
        reported.set()

    async def states(change: object) -> bool:
        view.apply(change)  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        return reported.is_set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not reported.is_set(), "the view may be behind"
        assert not await states(joined("b", 1, OTHER))
        assert not await states(joined("a", 1, SOURCE))
        assert not await states(Drains(Identity("a", 1)))
        assert not await states(Gone(Identity("b", 1)))
        assert await states(Gone(Identity("a", 1), "lost"))


async def test_another_life_of_its_name_is_not_the_node() -> None:
    view = Membership()
    async with trio.open_nursery() as nursery:
        view.apply(joined("a", 1, SOURCE))
        nursery.start_soon(trio_services.until_gone, view, SOURCE)
        await trio.testing.wait_all_tasks_blocked()
        view.apply(joined("a", 2, b"its next life"))
