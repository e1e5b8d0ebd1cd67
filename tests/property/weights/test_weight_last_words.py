"""Receivers may verify a version, and the coordinator decide it, before a trainer reported that it wrote everything."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

from asyncfabric.weights.messages import Wrote
from asyncfabric.weights.update import WeightMessage

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

LATE = "trainer-1"
SOON_S, GRACE_S = 20.0, 60.0


def speak_late(fixture: Fixture, last: Callable[[], Awaitable[bool]]) -> None:
    """Ask `last`, once its version is decided, whether the late trainer reports that it wrote."""
    channel = fixture.post._members[LATE]
    send = channel.send

    async def late(to: str, message: WeightMessage) -> None:
        if isinstance(message, Wrote):
            while fixture.coordinator.committed < message.version:
                await fixture.coordinator._updates.changed.wait()
            await anyio.sleep(0.02)
            if not await last():
                return
        await send(to, message)

    channel.send = late  # type: ignore[method-assign]


def updated(last: Callable[[Fixture], Awaitable[bool]], grace_s: float) -> set[str]:
    """Return who is in the report of an update in which one trainer speaks late."""
    found: set[str] = set()

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_fixture(
                small_plan(),
                random_shard,
                Path(folder) / "log",
                codings=("exponent",),
                coding="always",
                grace_s=grace_s,
            ) as fixture:
                speak_late(fixture, lambda: last(fixture))
                with anyio.fail_after(SOON_S):
                    report = await fixture.update(1)
                await fixture.flip(1)
                fixture.check(1)
                assert report.write_s <= report.seconds and report.prepare_core_s > 0
                found.update(one.sender for one in report.codings)

    run(body)
    return found


def test_the_report_has_what_a_trainer_reported_after_the_decision() -> None:
    async def speak(fixture: Fixture) -> bool:
        return True

    assert updated(speak, GRACE_S) == {"trainer-0", LATE}


def test_a_trainer_that_dies_after_the_decision_is_not_waited_for() -> None:
    async def die(fixture: Fixture) -> bool:
        fixture.post.close(LATE, "killed")
        return False

    assert updated(die, GRACE_S) == {"trainer-0"}


def test_a_trainer_that_sends_nothing_is_waited_for_no_longer_than_the_grace() -> None:
    async def hush(fixture: Fixture) -> bool:
        return False

    assert updated(hush, 0.2) == {"trainer-0"}
