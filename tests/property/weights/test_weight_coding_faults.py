"""Coded updates in which something goes wrong: nothing is half done, and the version after it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Relay
from asyncfabric.weights.coding.lane import CodingLane
from asyncfabric.weights.messages import Coded, Opened
from asyncfabric.weights.receiver.slots import SLOTS, Arrivals

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow

ALWAYS: dict[str, Any] = {"codings": ("delta", "exponent"), "coding": "always"}
TIGHT = SLOTS * 2 * 49216
"""Room for one row in each slot of two trainers: whoever sends has to wait."""


def tight(name: str) -> dict[str, Any]:
    return {"coding_bytes": TIGHT}


SLOW = "fault+local?delay_us=30000"
"""Each write is held for a while, so that there is something to wait for."""


async def begun(fixture: Fixture, versions: int = 1) -> None:
    """Let versions serve; the next one goes as deltas."""
    for version in range(1, versions + 1):
        await fixture.update(version)
        await fixture.flip(version)
        fixture.nudge(version)


@pytest.mark.parametrize(
    ("codings", "where"), [(("delta",), 0.0), (("delta",), 0.6), (("exponent",), 0.2), (("exponent",), 0.99)]
)
def test_a_flipped_byte_of_a_coded_row_is_found_before_the_commit(
    tmp_path: Path, codings: tuple[str, ...], where: float
) -> None:
    async def body() -> None:
        async with open_fixture(
            small_plan(), random_shard, tmp_path / "log", codings=codings, coding="always"
        ) as fixture:
            await begun(fixture)
            before = {
                name: {key: one.copy() for key, one in each.tensors().items()}
                for name, each in fixture.replicas.items()
            }
            victim, decode = fixture.replicas["b/1"], Arrivals._decode

            def flipped(self: Any, rows: list[int], kinds: list[int], lengths: list[int], at: int) -> None:
                if self._into in victim._versions.copies:
                    self._slot_memory.memory[at + int(lengths[0] * where)] ^= 0x10
                decode(self, rows, kinds, lengths, at)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Arrivals, "_decode", flipped)
                with pytest.raises(af.BrokenError, match=r"version 2 was not committed: b/1: .*trainer-"):
                    await fixture.update(2)
            assert fixture.coordinator.committed == 1
            for name, replica in fixture.replicas.items():
                assert replica.step_boundary() == 1
                assert all(np.array_equal(one, before[name][key]) for key, one in replica.tensors().items())
            for version, got in ((3, set()), (4, set(codings))):  # once plain, then coded again
                report = await fixture.update(version)
                assert {one.coding for one in report.codings if one.receiver == "b/1"} == got
                await fixture.flip(version)
                fixture.check(version)
                fixture.nudge(version)

    run(body)


@pytest.mark.parametrize("relay", [None, Relay(2, 1)])
def test_a_receiver_dies_while_a_trainer_waits_for_its_slots(tmp_path: Path, relay: Relay | None) -> None:
    async def body() -> None:
        async with open_fixture(
            small_plan(relay=relay), random_shard, tmp_path / "log", **ALWAYS, reads=tight
        ) as fixture:
            await begun(fixture)
            fixture.change(1)  # every element: rows go as they are, and fill more slots than there are
            name = next(one for one, replica in fixture.replicas.items() if replica.tensors() and one.endswith("/1"))
            fixture.kill_at(name, Coded)
            if relay is None:
                await fixture.bring(2)
            else:
                with pytest.raises(af.BrokenError, match="killed"):
                    await fixture.update(2)
                assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
            await fixture.bring(3)

    run(body)


def test_a_receiver_dies_before_the_first_coded_row(tmp_path: Path) -> None:
    """Its memory takes what is written, but nobody is there to read it: trainers do not wait for its slots."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", **ALWAYS, reads=tight) as fixture:
            await begun(fixture)
            fixture.change(1)
            victim = fixture.replicas.pop("b/1")
            killed = False
            for publisher in fixture.publishers:
                codings = publisher._codings
                assert codings is not None

                async def late(*arguments: Any, codings: Any = codings, begin: Any = codings.begin) -> Any:
                    nonlocal killed
                    if not killed:
                        killed = True
                        victim._carry_out = lambda effects: None  # type: ignore[method-assign]  # takes back no key
                        fixture.post.close("b/1", "killed")
                    while "b/1" not in codings._gone:
                        await anyio.lowlevel.checkpoint()
                    return await begin(*arguments)

                codings.begin = late  # type: ignore[method-assign]
            await fixture.bring(2)

    run(body)


def test_a_trainer_dies_while_a_receiver_waits_for_its_rows(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", **ALWAYS, reads=tight) as fixture:
            await begun(fixture)
            before = fixture.replicas["a/0"].tensors()
            doomed = fixture.publishers.pop()
            reported = 0
            send = doomed._post

            async def die(to: str, message: Any) -> None:
                nonlocal reported
                reported += isinstance(message, Coded)
                if reported == 3 and isinstance(message, Coded):
                    fixture.post.close("trainer-1", "killed")
                await send(to, message)

            doomed._post = die  # type: ignore[method-assign]
            outcomes: list[str] = []

            async def publish(publisher: Any) -> None:
                with pytest.raises(af.FabricError) as error:
                    await publisher.publish(2)
                outcomes.append(str(error.value))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish, doomed)
                tasks.start_soon(publish, fixture.publishers[0])
                with pytest.raises(af.BrokenError, match="trainer-1: killed"):
                    await fixture.coordinator.update(2)
            assert reported >= 3 and len(outcomes) == 2
            assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
            assert all(np.array_equal(one, before[key]) for key, one in fixture.replicas["a/0"].tensors().items())

    run(body)


def test_a_cancelled_publish_leaves_nothing_under_way(tmp_path: Path) -> None:
    """INV-2, wherever it is cut: nothing is in flight then, and the next version is whole, from a good base."""

    async def body() -> None:
        async with open_fixture(
            small_plan(), random_shard, tmp_path / "log", rail=SLOW, **ALWAYS, reads=tight
        ) as fixture:
            await begun(fixture)
            flush, version, cuts = CodingLane.flush, 1, 0
            for steps in (1, 3):
                version += 1
                serving = fixture.coordinator.committed
                scope, left, lanes = anyio.CancelScope(), [-1], set[CodingLane]()

                async def cut(
                    self: CodingLane, steps: int = steps, scope: Any = scope, lanes: set[CodingLane] = lanes
                ) -> None:
                    nonlocal cuts
                    posts = bool(self._rows) and self._fabric is fixture.fabrics["trainer-0"]
                    await flush(self)
                    if posts:
                        lanes.add(self)
                        cuts += 1
                        if cuts == steps:
                            scope.cancel()

                async def publish(
                    version: int = version, scope: Any = scope, left: list[int] = left, lanes: set[CodingLane] = lanes
                ) -> None:
                    with scope:
                        await fixture.publishers[0].publish(version)
                    left[0] = sum(not each.done for lane in lanes for each in lane._transfers if each is not None)

                async def other(version: int = version) -> None:
                    with pytest.raises(af.BrokenError):
                        await fixture.publishers[1].publish(version)

                cuts = 0
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(CodingLane, "flush", cut)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(publish)
                        tasks.start_soon(other)
                        with pytest.raises(af.BrokenError, match="its publish was cancelled"):
                            await fixture.coordinator.update(version)
                assert left == [0] and cuts >= steps
                assert {replica.step_boundary() for replica in fixture.replicas.values()} == {serving}
                fixture.nudge(steps)
                version += 1
                report = await fixture.update(version)
                assert {one.coding for one in report.codings} == {"delta"}
                await fixture.flip(version)
                fixture.check(version)

    run(body)


def test_keys_of_slots_are_dead_when_their_version_has_ended(tmp_path: Path) -> None:
    """WC-4: a late write of an ended version cannot touch the slots of a later one."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", **ALWAYS) as fixture:
            keys: list[af.RegionKey] = []
            take = fixture.publishers[0]._take_message

            def listening(sender: str, event: Any) -> None:
                if isinstance(event, Opened) and event.coded_slots is not None:
                    keys.append(af.RegionKey.from_bytes(event.coded_slots.key))
                take(sender, event)

            fixture.publishers[0]._take_message = listening  # type: ignore[method-assign]
            await begun(fixture, 2)
            fabric = fixture.fabrics["trainer-0"]
            poison = await fabric.allocate(64)
            assert len(keys) == 2 * len(fixture.replicas)
            for key in keys:
                with pytest.raises((af.StaleKeyError, af.TransferError)):
                    await fabric.write(poison, key, 0)
            await poison.release()

    run(body)


def test_a_trainer_that_sends_what_is_not_its_to_send_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", **ALWAYS) as fixture:
            await begun(fixture)
            liar = fixture.publishers[0]
            send, reported, lie = liar._post, 0, ""

            async def lying(to: str, message: Any) -> None:
                nonlocal reported
                if isinstance(message, Coded) and to == "b/1":
                    reported += 1
                    rows = np.frombuffer(message.rows, "<i8")
                    changed: dict[str, Any] = {
                        "slot": {"slot": SLOTS},
                        "columns": {"sums": message.sums[8:]},
                        "rows": {"rows": (rows + 1).tobytes()},
                        "length": {"lengths": np.full(len(rows), 1 << 40, "<i8").tobytes()},
                        "coding": {"codings": bytes([9] * len(rows))},
                    }
                    fields = {name: getattr(message, name) for name in message.__struct_fields__} | changed[lie]
                    message = Coded(**fields)
                await send(to, message)

            liar._post = lying  # type: ignore[method-assign]
            reasons = {
                "slot": "filled slot 2 of version 2, not its to fill",
                "columns": "in columns of different lengths",
                "rows": "rows of version 4 that are not its",
                "length": "coded bytes in",
                "coding": "in a coding that this receiver did not ask for",
            }
            for version, (kind, reason) in enumerate(reasons.items(), start=2):
                lie = kind
                with pytest.raises(af.BrokenError, match=f"b/1: .*trainer-0.*{reason}"):
                    await fixture.update(version)
                assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
            assert reported >= len(reasons)

    run(body)
