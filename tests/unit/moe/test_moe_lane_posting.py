"""What a lane posts while the fabric has no room: what has begun is posted whole, what has not is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from asyncfabric import BusyError, ScatterTarget, TransferError
from asyncfabric.moe.host.arrivals import ArrivalKind
from asyncfabric.moe.host.lane import Lane, LaneStep
from asyncfabric.moe.host.passes import PassPlan
from asyncfabric.moe.host.routing import Route

pytestmark = pytest.mark.anyio


class FullFabric:
    """Has no room for the first transfers; counts what it was given."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.scattered: list[Any] = []

    def scatter(self, source: object, targets: Any, imm: int) -> object:
        if self.refusals:
            self.refusals -= 1
            raise BusyError("no room")
        self.scattered.append(targets)
        return SimpleNamespace(done=True, result=lambda: None)

    async def wait_writable(self) -> None:
        await anyio.lowlevel.checkpoint()


def lane_on(fabric: Any, me: int = 0, members: int = 2) -> Lane:
    shape = SimpleNamespace(in_flight=2, members=members, back_rows=1000, area_rows=1000, private=4)
    memory: Any = SimpleNamespace(shape=shape, incoming=None, staging=None)
    arrivals: Any = SimpleNamespace(imm=lambda kind, turn: 7)
    keys: Any = {member: f"key {member}" for member in range(members) if member != me}
    return Lane(fabric, memory, arrivals, me, range(members), {}, keys)


async def test_what_is_shielded_is_posted_though_its_task_is_cancelled() -> None:
    fabric = FullFabric(3)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await lane_on(fabric).post("back", ArrivalKind.BACK, 0, {1: ScatterTarget("key 1", 0, 0, 0)}, shield=True)
    assert fabric.scattered == [[("key 1", 0, 0, 0)]]


async def test_what_is_not_shielded_is_given_up() -> None:
    fabric = FullFabric(1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await lane_on(fabric).post("records", ArrivalKind.RECORD, 0, {1: ScatterTarget("key 1", 0, 0, 0)}, shield=False)
    assert scope.cancelled_caught and fabric.scattered == []


class PostedTransfer:
    """Has failed, or ends well when it is awaited."""

    def __init__(self, *, failed: bool) -> None:
        self.failed = self.done = failed

    def __await__(self) -> Any:
        yield from anyio.lowlevel.checkpoint().__await__()
        self.done = True

    def result(self) -> None:
        if self.failed:
            raise TransferError("refused")


async def test_a_failure_is_reported_when_nothing_reads_the_staging_memory_any_more() -> None:
    lane, failed, slow = lane_on(None), PostedTransfer(failed=True), PostedTransfer(failed=False)
    lane._posted["back"] = [(failed, (1,)), (slow, (1,))]  # type: ignore[list-item]
    with pytest.raises(TransferError, match="refused"):
        await lane.settle("back")
    assert slow.done
    await lane.settle("back")  # reported once


@pytest.mark.parametrize("which", ["back", "rest"])
@pytest.mark.parametrize("seed", range(20))
def test_one_pass_has_the_segments_of_the_plans(which: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    members = int(random.integers(1, 7))
    counts = random.integers(0, 9, size=(members, members)) * random.integers(0, 2, size=(members, members))
    me = int(random.integers(0, members))
    none = np.zeros(0, dtype=np.int64)
    step = LaneStep(0, 0, Route(none, none), [], np.zeros((0, 64), dtype=np.uint8), counts.tolist())
    found = lane_on(None, me, members).outgoing(step, which, 0)
    rows = counts if which == "back" else np.maximum(counts.T - 4, 0)
    wanted = [(member, PassPlan(rows[member].tolist(), member, 1000).segment(me, 0)) for member in range(members)]
    assert found == [(member, segment) for member, segment in wanted if segment.rows]
