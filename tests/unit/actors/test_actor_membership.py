"""The view of the cluster: lives and their successors, roles, waiting, the least loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from asyncfabric.actors import Identity
from asyncfabric.actors.membership import Drains, Gone, Joined, Loaded, Member, MemberChange, Membership

pytestmark = pytest.mark.trio


def member(name: str, incarnation: int = 1, role: str = "decode", load: float = 0.0) -> Member:
    return Member(Identity(name, incarnation), role, load=load)


def names(members: tuple[Member, ...]) -> list[str]:
    return [one.identity.name for one in members]


async def test_members_come_drain_and_go() -> None:
    view = Membership()
    for one in (member("b"), member("a"), member("p", role="prefill")):
        view.apply(Joined(one))
    assert names(view.members("decode")) == ["a", "b"]
    view.apply(Drains(Identity("a", 1)))
    assert names(view.members("decode")) == ["b"]
    assert names(view.members("decode", "draining")) == ["a"]
    assert names(view.members(state=None)) == ["a", "b", "p"]
    view.apply(Gone(Identity("b", 1), "lost"))
    assert view.members("decode") == ()
    assert view.least_loaded("decode") is None


async def test_what_is_stated_about_an_earlier_life_changes_nothing() -> None:
    view = Membership()
    view.apply(Joined(member("a", 1)))
    view.apply(Joined(member("a", 2)))
    for late in (Gone(Identity("a", 1)), Drains(Identity("a", 1)), Loaded(Identity("a", 1), 9.0)):
        view.apply(late)
    assert view.members() == (member("a", 2),)
    assert view.member(Identity("a", 1)) is None
    assert view.member(Identity("a", 2)) == member("a", 2)


async def test_waiting_for_a_role() -> None:
    view = Membership()
    seen: list[list[str]] = []

    async def wait() -> None:
        seen.append(names(await view.wait_for("decode", 2)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        view.apply(Joined(member("a")))
        view.apply(Joined(member("p", role="prefill")))
        await trio.testing.wait_all_tasks_blocked()
        assert seen == []
        view.apply(Joined(member("b")))
    assert seen == [["a", "b"]]


async def test_the_least_loaded_counts_what_was_assigned_here() -> None:
    view = Membership()
    view.apply(Joined(member("a", load=1.0)))
    view.apply(Joined(member("b", load=2.0)))

    def chosen() -> Identity:
        found = view.least_loaded("decode")
        assert found is not None
        return found.identity

    a, b = Identity("a", 1), Identity("b", 1)
    assert chosen() == a
    with view.assigned(a), view.assigned(a):
        assert chosen() == b
        view.apply(Loaded(b, 4.0))
        assert chosen() == a
    view.apply(Loaded(a, 5.0))
    assert chosen() == b


async def test_following_an_iterator_and_watching_the_view() -> None:
    view = Membership()

    async def changes() -> AsyncIterator[MemberChange]:
        yield Joined(member("a"))
        yield Joined(member("b"))
        yield Gone(Identity("a", 1))

    seen: list[list[str]] = []

    async def watch() -> None:
        async for members in view.views():
            seen.append(names(members))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        await view.follow(changes())
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert seen == [[], ["b"]]


async def test_members_by_load_begin_with_the_least_loaded() -> None:
    view = Membership()
    for one in (member("a", load=2.0), member("b"), member("c", load=1.0), member("p", role="prefill")):
        view.apply(Joined(one))
    assert names(view.by_load("decode")) == ["b", "c", "a"]
    with view.assigned(Identity("b", 1)), view.assigned(Identity("b", 1)):
        assert names(view.by_load("decode")) == ["c", "a", "b"]
        assert view.least_loaded("decode") == view.by_load("decode")[0]
