"""What a participant of an update sends: in order for each who receives it, and nobody waits for somebody else."""

from __future__ import annotations

import anyio
import pytest

from asyncfabric.errors import PeerError
from asyncfabric.weights.channel import Event
from asyncfabric.weights.messages import Commit, WeightMessage
from asyncfabric.weights.outbox import SENDING_TASKS, Outbox

pytestmark = pytest.mark.anyio


class Post:
    """A messenger whose sends wait for a gate: that of the one who is spoken to, or that of everybody."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []
        self.gates: dict[str, anyio.Event] = {}
        self.gone: set[str] = set()
        self.under_way = self.most = 0
        self._changed = anyio.Event()

    async def send(self, to: str, message: WeightMessage) -> None:
        assert isinstance(message, Commit)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self._report()
        if to in self.gates:
            await self.gates[to].wait()
        else:
            await anyio.lowlevel.checkpoint()
        self.under_way -= 1
        if to in self.gone:
            raise PeerError(f"{to} is gone")
        self.received.append((to, message.version))
        self._report()

    async def receive(self) -> tuple[str, Event]:
        raise NotImplementedError

    def take_nowait(self) -> list[tuple[str, Event]]:
        raise NotImplementedError

    def _report(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, received: int = 0, under_way: int = 0) -> None:
        with anyio.fail_after(10):
            while len(self.received) < received or self.under_way < under_way:
                await self._changed.wait()


async def test_each_receives_what_is_sent_to_it_in_order_also_what_was_put_before_and_meanwhile() -> None:
    post = Post()
    words = Outbox(post, "me")
    for version in range(5):
        for name in ("a", "b", "c"):
            words.put(name, Commit(version))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(words.run)
        for version in range(5, 20):
            for name in ("c", "a"):
                words.put(name, Commit(version))
            await anyio.lowlevel.checkpoint()
        await post.until(received=5 + 20 + 20)
        tasks.cancel_scope.cancel()
    for name, count in (("a", 20), ("b", 5), ("c", 20)):
        assert [version for to, version in post.received if to == name] == list(range(count))


async def test_who_cannot_be_reached_soon_keeps_nobody_from_receiving() -> None:
    post = Post()
    post.gates = {"stuck": anyio.Event()}
    words = Outbox(post, "me")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(words.run)
        for version in range(3):
            words.put("stuck", Commit(version))
            for number in range(SENDING_TASKS + 5):
                words.put(f"other {number}", Commit(version))
        await post.until(received=3 * (SENDING_TASKS + 5))
        assert all(to != "stuck" for to, _ in post.received)
        post.gates.pop("stuck").set()
        await post.until(received=3 * (SENDING_TASKS + 6))
        assert [version for to, version in post.received if to == "stuck"] == [0, 1, 2]
        tasks.cancel_scope.cancel()


async def test_what_is_sent_to_many_goes_side_by_side_but_not_all_at_once() -> None:
    post = Post()
    gate = anyio.Event()
    names = [f"r/{number}" for number in range(3 * SENDING_TASKS)]
    post.gates = dict.fromkeys(names, gate)
    words = Outbox(post, "me")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(words.run)
        for name in names:
            words.put(name, Commit(7))
        await post.until(under_way=SENDING_TASKS)
        assert post.received == []
        gate.set()
        await post.until(received=len(names))
        tasks.cancel_scope.cancel()
    assert post.most == SENDING_TASKS
    assert sorted(post.received) == sorted((name, 7) for name in names)


async def test_who_did_not_receive_is_reported_and_the_next_words_are_tried() -> None:
    post, unsent = Post(), list[tuple[str, int]]()
    post.gone = {"a"}

    def note(to: str, message: WeightMessage, error: Exception) -> None:
        assert isinstance(message, Commit) and "a is gone" in str(error)
        unsent.append((to, message.version))
        post.gone.discard("a")  # it is back

    words = Outbox(post, "me", note)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(words.run)
        words.put("a", Commit(1))
        words.put("a", Commit(2))
        await post.until(received=1)
        tasks.cancel_scope.cancel()
    assert unsent == [("a", 1)] and post.received == [("a", 2)]


async def test_who_ends_can_wait_until_what_it_sent_has_left() -> None:
    post = Post()
    post.gates = {name: anyio.Event() for name in ("slow", "other")}
    post.gone = {"gone"}
    outbox = Outbox(post, "me")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        for name in ("slow", "gone", "other"):
            outbox.put(name, Commit(1))
        with anyio.fail_after(10):
            await outbox.wait_sent(["gone", "nobody"])
        with anyio.move_on_after(0.05) as early:
            await outbox.wait_sent(["slow", "gone"])
        assert early.cancelled_caught
        post.gates["slow"].set()
        with anyio.fail_after(10):
            await outbox.wait_sent(["slow", "gone"])
        assert post.received == [("slow", 1)]
        tasks.cancel_scope.cancel()
