"""What a trainer reports that its version waits for, and from whom, at each stage that can take long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from weight_fixture import Fixture, open_fixture, run

from asyncfabric.weights.messages import Maxima, Opened, Outcome, decode_message
from asyncfabric.weights.sender.version import AwaitedMessages
from asyncfabric.weights.update import COORDINATOR, WeightMessage
from asyncfabric_services.bench.weights.workload import plan_of, rows_at, rows_of

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

PATIENCE_S = 30.0
SIDE, TRAINERS = 256, 3


def shard(rank: int, name: str) -> Any:
    return rows_of(int(name.split()[1]), SIDE, *rows_at(rank, TRAINERS, SIDE), 0, "fp8")


def held_back(fixture: Fixture, which: Callable[[str, str, WeightMessage], bool]) -> Callable[[], None]:
    """Keep messages; returns what lets them go."""
    deliver = fixture.post.deliver
    kept: list[tuple[str, str, bytes]] = []

    def keep(sender: str, to: str, data: bytes) -> None:
        if which(sender, to, decode_message(data)):
            kept.append((sender, to, data))
        else:
            deliver(sender, to, data)

    def let_go() -> None:
        fixture.post.deliver = deliver  # type: ignore[method-assign]
        for each in kept:
            deliver(*each)
        assert kept, "nothing was held back"

    fixture.post.deliver = keep  # type: ignore[method-assign]
    return let_go


def kept(kind: type, receiver: str, sender: str = "") -> Callable[[str, str, WeightMessage], bool]:
    return lambda who, to, stated: isinstance(stated, kind) and to == receiver and sender in ("", who)


@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        (kept(Opened, "trainer-1", "replica 0/1"), AwaitedMessages("keys of receivers", ("replica 0/1",))),
        (kept(Opened, "trainer-1"), AwaitedMessages("keys of receivers", ("replica 0/0", "replica 0/1"))),
        (kept(Maxima, "trainer-1", "trainer-2"), AwaitedMessages("maxima of blocks", ("trainer-2",))),
        (kept(Outcome, "trainer-1"), AwaitedMessages("the decision", (COORDINATOR,))),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, which: Callable[[str, str, WeightMessage], bool], wanted: AwaitedMessages
) -> None:
    plan = plan_of(TRAINERS, 2, 1, 2, SIDE, "fp8")

    async def body() -> None:
        async with open_fixture(plan, shard, tmp_path / "log") as fixture:
            publisher = fixture.publishers[1]
            assert publisher.awaited is None
            let_go = held_back(fixture, which)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.publish, 1)
                await anyio.wait_all_tasks_blocked()
                assert publisher.awaited == AwaitedMessages("the offers of all trainers", (COORDINATOR,))
                for other in (fixture.publishers[0], fixture.publishers[2]):
                    tasks.start_soon(other.publish, 1)
                tasks.start_soon(fixture.coordinator.update, 1)
                with anyio.fail_after(PATIENCE_S):
                    while publisher.awaited != wanted:  # noqa: ASYNC110
                        await anyio.sleep(0.001)  # stages pass by
                    await anyio.sleep(0.05)
                    assert publisher.awaited == wanted, "until it comes"
                    let_go()
            assert publisher.awaited is None
            await fixture.flip(1)
            fixture.check(1)

    run(body)
