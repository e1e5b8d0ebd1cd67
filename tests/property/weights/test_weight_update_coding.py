"""Updates in coded rows over real fabrics: every receiver holds the bits of the reference, whatever came in between."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from weight_cases import Case, cases
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Relay, plan_weights
from asyncfabric.weights.receiver.intake import Intake
from asyncfabric.weights.update import UpdateReport, open_replica

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow

BOTH = ("delta", "exponent")
RAIL = "fault+local?reorder=8&delay_us=200&seed=7"
"""No order, and late."""


def used(report: UpdateReport) -> dict[str, set[str]]:
    """What each receiver was sent in."""
    found: dict[str, set[str]] = {}
    for one in report.codings:
        found.setdefault(one.receiver, set()).add(one.coding)
    return found


def everywhere(fixture: Fixture, coding: str) -> dict[str, set[str]]:
    return {name: {coding} for name in fixture.replicas}


async def aborted(fixture: Fixture, version: int, victim: str) -> None:
    """A version that a receiver finds wrong."""
    right = Intake._right
    copies = fixture.replicas[victim]._versions.copies

    async def wrong(self: Any, rows: list[int], sums: list[int], kind: Any) -> list[bool]:
        return [False] * len(rows) if self.copy in copies else await right(self, rows, sums, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Intake, "_right", wrong)
        with pytest.raises(af.BrokenError, match="wrong bytes"):
            await fixture.update(version)


@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(
    cases(quantised=True),
    st.builds(Relay, st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from([100, 1 << 12, 1 << 20]),
    st.sampled_from([("delta",), ("exponent",), BOTH]),
    st.integers(0, 2),
    st.sampled_from([1 << 17, 1 << 22]),
)
def test_coded_updates_equal_the_reference(
    case: Case, relay: Relay, chunk_bytes: int, codings: tuple[str, ...], abort: int, coding_bytes: int
) -> None:
    names = [f"replica {number}" for number in range(case.replicas)]
    plan = plan_weights(
        case.moves,
        trainers=case.trainers,
        receivers=case.receivers,
        replicas=names,
        relay=relay,
        chunk_bytes=chunk_bytes,
    )

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_fixture(
                plan,
                case.shard,
                Path(folder) / "log",
                codings=codings,
                coding="always",
                reads=lambda name: {"coding_bytes": coding_bytes},
            ) as fixture:
                for version in (1, 2, 3, 4):
                    victim = next(iter(fixture.replicas))
                    if version == abort + 1 and fixture.replicas[victim].tensors():
                        await aborted(fixture, version, victim)
                        continue
                    report = await fixture.update(version)
                    assert all(one.sent_bytes <= one.plain_bytes for one in report.codings)
                    await fixture.flip(version)
                    fixture.check(version)
                    fixture.nudge(version) if version < 3 else fixture.change(1)

    run(body)


def test_deltas_begin_with_a_base_and_survive_an_abort(tmp_path: Path) -> None:
    """What a receiver holds decides: a joiner without a base gets none, an aborted version is nobody's base."""

    async def body() -> None:
        plan = small_plan()
        async with open_fixture(
            plan, random_shard, tmp_path / "log", rail=RAIL, codings=BOTH, coding="always"
        ) as fixture:
            report = await fixture.update(1)
            assert used(report) == everywhere(fixture, "exponent")
            await fixture.flip(1)
            for version in (2, 3):
                fixture.nudge(version)
                report = await fixture.update(version)
                assert used(report) == everywhere(fixture, "delta")
                plain = sum(one.plain_bytes for one in report.codings)
                assert sum(one.saved_bytes for one in report.codings) > 0.4 * plain
                assert report.sent_bytes == sum(one.sent_bytes for one in report.codings), "all went coded"
                await fixture.flip(version)
                fixture.check(version)
            fixture.nudge(4)
            await aborted(fixture, 4, "b/1")
            assert {replica.step_boundary() for replica in fixture.replicas.values()} == {3}
            fixture.nudge(5)
            report = await fixture.update(5)  # what went wrong was coded: "b/1" wants plain bytes once
            assert used(report) == {"a/0": {"delta"}, "a/1": {"delta"}, "b/0": {"delta"}}
            await fixture.flip(5)
            fixture.check(5)
            fixture.coordinator._updates.machine._send_elsewhere = list  # type: ignore[method-assign]  # catches nobody up
            async with (
                af.open_fabric(af.FabricConfig(rails=(RAIL,))) as one,
                af.open_fabric(af.FabricConfig(rails=(RAIL,))) as other,
                open_replica(one, fixture.post.open("late/0"), plan, "late", 0, codings=("delta",)) as first,
                open_replica(other, fixture.post.open("late/1"), plan, "late", 1) as second,
            ):
                await fixture.coordinator.wait_receivers(["late/0", "late/1"])
                for version, got in ((6, "full"), (7, "delta")):
                    fixture.nudge(version)
                    report = await fixture.update(version)
                    assert used(report) == everywhere(fixture, "delta") | {"late/0": {got}}
                    await fixture.flip(version)
                    fixture.check(version)
                    for replica in (first, second):
                        await replica.wait_version(version)
                        assert replica.step_boundary() == version
                        tensors = fixture.replicas[f"a/{replica.receiver}"].tensors()
                        assert all((mine == tensors[name]).all() for name, mine in replica.tensors().items())
                for name in ("late/0", "late/1"):
                    fixture.post.close(name)

    run(body)


def test_a_trainer_that_does_not_know_how_a_version_ended_has_no_base(tmp_path: Path) -> None:
    """Its base is older than what receivers hold then; they report that, and get the bits of the version after it."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", codings=BOTH, coding="always") as fixture:
            codings = fixture.publishers[0]._codings
            assert codings is not None
            end = codings.end
            wanted = {1: set(), 2: {"delta"}, 3: {"exponent"}, 4: {"delta"}}  # the third is after the one in question
            for version, expected in wanted.items():
                codings.end = lambda committed, version=version: end(committed if version != 2 else 0)  # type: ignore[assignment, misc]
                await fixture.update(version)
                report = next(one for one in fixture.reports[-2:] if one.codings[0].sender == "trainer-0")
                assert {one.coding for one in report.codings} == expected or version == 1
                await fixture.flip(version)
                fixture.check(version)
                fixture.nudge(version)

    run(body)


def test_in_place_there_is_no_base(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(
            small_plan(names=("a",)),
            random_shard,
            tmp_path / "log",
            codings=BOTH,
            coding="always",
            shadow=lambda name: False,
            rail="tcp",
        ) as fixture:
            report = await fixture.update(1)
            assert used(report) == everywhere(fixture, "exponent")
            assert [publisher._codings._bases.collects for publisher in fixture.publishers] == [False, False]  # type: ignore[union-attr]
            await fixture.flip(1)
            fixture.check(1)

    run(body)


def test_a_receiver_that_wants_none_and_one_with_little_room_get_plain_bytes(tmp_path: Path) -> None:
    async def body() -> None:
        offers = {"a/0": {"codings": ()}, "b/1": {"coding_bytes": 4096}}
        async with open_fixture(
            small_plan(),
            random_shard,
            tmp_path / "log",
            codings=BOTH,
            coding="always",
            reads=lambda name: offers.get(name, {}),
        ) as fixture:
            for version in (1, 2):
                report = await fixture.bring(version)
                fixture.nudge(version)
            assert used(report) == {"a/1": {"delta"}, "b/0": {"delta"}, "b/1": {"full"}}
            little = [one for one in report.codings if one.receiver == "b/1"]
            assert all("coding_bytes are too few: give " in one.why and not one.saved_bytes for one in little)
            unread = sum(one.plain_bytes for one in report.codings if one.receiver == "b/0")  # as much as "a/0" gets
            assert report.sent_bytes == unread + sum(one.sent_bytes for one in report.codings)
            assert set(report.codings) == {one for each in fixture.reports[-2:] for one in each.codings}

    run(body)
