"""Receivers forward in coded rows: the bits of the reference everywhere, whatever a relay gets and whoever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from weight_fixture import SHAPE, Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Mesh, Move, Relay, Shard, alone, place, plan_weights
from asyncfabric.weights.coding.choice import Coding, CostRule
from asyncfabric.weights.messages import Coded
from asyncfabric.weights.receiver import coded_forwarding
from asyncfabric.weights.update import CodingReport, UpdateReport

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow

BOTH = ("delta", "exponent")
CHAIN = Relay(0, 1)
"""Trainers feed the first replica, which feeds the second, which feeds the third."""
RAIL = "fault+local?reorder=8&delay_us=200&seed=7"
"""No order, and late."""


def chain(relay: Relay = CHAIN) -> Any:
    return small_plan(names=("a", "b", "c"), relay=relay)


def links(report: UpdateReport) -> dict[tuple[str, str], CodingReport]:
    """What was sent between receivers."""
    return {(one.sender, one.receiver): one for one in report.codings if not one.sender.startswith("trainer")}


async def nudged(fixture: Fixture, version: int) -> UpdateReport:
    """A step that changes few weights, brought everywhere and checked."""
    fixture.nudge(version)
    return await fixture.bring(version)


def test_a_chain_of_replicas_forwards_deltas(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", rail=RAIL, codings=BOTH, coding="always"
        ) as fixture:
            first = links(await fixture.bring(1))
            assert first.keys() == {("a/0", "b/0"), ("a/1", "b/1"), ("b/0", "c/0"), ("b/1", "c/1")}
            assert {one.coding for one in first.values()} == {"exponent"}
            for version in (2, 3):
                found = links(await nudged(fixture, version))
                assert found.keys() == first.keys() and {one.coding for one in found.values()} == {"delta"}
                for name, one in found.items():
                    assert one.plain_bytes == first[name].plain_bytes > first[name].sent_bytes > one.sent_bytes > 0, (
                        name
                    )

    run(body)


def test_ranks_of_a_node_forward_deltas_to_each_other(tmp_path: Path) -> None:
    """What several ranks of a node want comes to one of them; the ranks take turns, so each feeds the other."""
    trainer, replica = Mesh.of({"fsdp": 2}), Mesh.of({"tp": 2})
    held, whole = place(SHAPE, trainer, {"fsdp": Shard(0)}), place(SHAPE, replica, {})
    moves = [Move(name, "bfloat16", held, name, "bfloat16", alone(whole)) for name in ("gate", "up")]
    plan = plan_weights(moves, trainers=2, receivers=2, replicas=("a",), relay=Relay(2, 0), chunk_bytes=1 << 14)

    async def body() -> None:
        async with open_fixture(plan, random_shard, tmp_path / "log", codings=BOTH, coding="always") as fixture:
            await fixture.bring(1)
            found = links(await nudged(fixture, 2))
            assert found.keys() == {("a/0", "a/1"), ("a/1", "a/0")}
            assert {one.coding for one in found.values()} == {"delta"}

    run(body)


def test_who_reads_nothing_gets_plain_rows_and_passes_them_on_plain(tmp_path: Path) -> None:
    reads: dict[str, dict[str, Any]] = {"a": {}, "b": {"codings": ()}, "c": {"codings": ("exponent",)}}

    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", codings=BOTH, coding="always", reads=lambda name: reads[name[0]]
        ) as fixture:
            await fixture.bring(1)
            assert links(await nudged(fixture, 2)) == {}

    run(body)


def test_a_relay_codes_what_came_to_it_plain(tmp_path: Path) -> None:
    """Trainers that write no coding, on a wire that needs none, and a receiver far away."""

    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", reads=lambda name: {"codings": BOTH, "coding": "always"}
        ) as fixture:
            await fixture.bring(1)
            report = await nudged(fixture, 2)
            assert len(report.codings) == len(links(report)) == 4
            assert {one.coding for one in report.codings} == {"delta"}

    run(body)


def test_one_that_is_overwritten_in_place_passes_on_packed_rows(tmp_path: Path) -> None:
    """It has no base any more, so it neither reads deltas nor writes them."""

    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", codings=BOTH, coding="always", shadow=lambda name: name[0] != "b"
        ) as fixture:
            await fixture.bring(1)
            fixture.nudge(1)
            reports: list[UpdateReport] = []

            async def update() -> None:
                reports.append(await fixture.update(2))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                for name in ("b/0", "b/1"):
                    await fixture.replicas[name].wait_changed()
                    assert fixture.replicas[name].step_boundary() == 0
            await fixture.flip(2)
            fixture.check(2)
            assert len(found := links(reports[0])) == 4 and {one.coding for one in found.values()} == {"exponent"}

    run(body)


def test_a_relay_that_codes_wrongly_is_found_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version of the base is another one: the sum that the trainer gave does not fit what is decoded."""
    right = coded_forwarding._bytes

    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", codings=("delta",), coding="always"
        ) as fixture:
            await fixture.bring(1)
            before = fixture.expected()
            fixture.nudge(1)

            def wrong(copy: Any, places: Any, row: int) -> Any:
                found = right(copy, places, row)
                if copy is not fixture.replicas["b/1"]._versions._base():
                    return found
                found = found.copy()
                found[len(found) // 2] ^= 1
                return found

            monkeypatch.setattr(coded_forwarding, "_bytes", wrong)
            with pytest.raises(af.BrokenError, match=r"c/1: .* rows have wrong bytes, .* of b/1"):
                await fixture.update(2)
            fixture.check(1, before)
            monkeypatch.setattr(coded_forwarding, "_bytes", right)
            found = links(await fixture.bring(3))
            assert ("b/1", "c/1") not in found, "who was reported wrong things takes the next version plain"
            assert {one.coding for one in found.values()} == {"delta"}
            found = links(await nudged(fixture, 4))
            assert found["b/1", "c/1"].coding == "delta"

    run(body)


@pytest.mark.parametrize("victim", ["a/0", "b/1", "c/0"])
def test_who_dies_in_the_middle_of_coded_forwarding_leaves_everybody_whole(tmp_path: Path, victim: str) -> None:
    """The update is aborted, since others depend on who died; the next one does without its replica."""

    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", codings=BOTH, coding="always", grace_s=60.0
        ) as fixture:
            await fixture.bring(1)
            before = fixture.expected()
            fixture.nudge(1)
            fixture.kill_at(victim, Coded)
            with pytest.raises(af.BrokenError, match=victim):
                await fixture.update(2)
            fixture.check(1, before)
            report = await fixture.bring(3)
            assert victim not in report.receivers and links(report) == {}, "nobody forwards for a part of a replica"
            await nudged(fixture, 4)

    run(body)


@pytest.mark.parametrize(("wire_bytes_per_s", "expected"), [(20e9, ["full"] * 5), (5e6, ["full"] * 3 + ["delta"] * 2)])
def test_a_relay_measures_its_own_wires(tmp_path: Path, wire_bytes_per_s: float, expected: list[str]) -> None:
    """Codings are tried for real; only what plain bytes reach is fixed here: a wire of this machine has no bounds."""

    async def body() -> None:
        async with open_fixture(
            chain(), random_shard, tmp_path / "log", reads=lambda name: {"codings": BOTH}
        ) as fixture:
            tried = [
                measured_at(forwards.cost_rule, wire_bytes_per_s)
                for replica in fixture.replicas.values()
                if (forwards := replica._versions._receiving._forwards) is not None and replica.name != "c"
            ]
            found: list[set[str]] = []
            for version in range(1, 6):
                found.append({one.coding for one in links(await nudged(fixture, version)).values()})
                if version == 2:  # now there is a version to make deltas against
                    for each in tried:
                        await each.wait()
            assert found == [{one} for one in expected]

    run(body)


def measured_at(cost_rule: CostRule, wire_bytes_per_s: float) -> anyio.Event:
    """Announce that plain bytes reach this, and coded ones twice that; returns what is set when codings were tried."""
    sent, measured, done = cost_rule.sent, cost_rule.measured, anyio.Event()

    def take(costs: Any) -> None:
        measured(costs)
        done.set()

    cost_rule.measured = take  # type: ignore[method-assign]
    cost_rule.sent = lambda rates: sent(  # type: ignore[method-assign]
        [(name, one, wire_bytes_per_s * (1 if one is Coding.FULL else 2)) for name, one, _ in rates]
    )
    return done
