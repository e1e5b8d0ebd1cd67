"""Weights that change while they are published: the version is of two steps, so nobody may commit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_fixture import open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import threads
from asyncfabric.weights.sender.pipeline import WeightSending

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("busy", [2, 8])
@pytest.mark.parametrize("names", [("gate", "up"), ("down",)])
def test_weights_that_change_while_they_are_published_are_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], busy: int
) -> None:
    """Quantised and as they are, gathered by the rail and staged: what was sent may be of two steps."""
    monkeypatch.setattr(threads, "threads", lambda: busy)

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            retire = WeightSending._retire

            async def late(self: Any, posted: Any) -> None:
                if self._shards is fixture.publishers[1]._shards:
                    for name in names:
                        fixture.shards[1][name][::7, ::5] ^= 1  # few of them, by little
                await retire(self, posted)

            with monkeypatch.context() as patch:
                patch.setattr(WeightSending, "_retire", late)
                with pytest.raises(af.BrokenError, match=r"version 2 was not committed: .*weights changed while they"):
                    await fixture.update(2)
            for replica in fixture.replicas.values():
                assert replica.step_boundary() == 1
            fixture.check(1, before)
            await fixture.bring(3)

    run(body)


def test_what_lies_beside_the_weights_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are often parts of one large memory, with gradients beside them."""
    arenas: list[Any] = []

    def in_arena(rank: int, held: dict[str, Any]) -> dict[str, Any]:
        names = sorted(held)
        arena = np.zeros((2 * len(names), held[names[0]].size), held[names[0]].dtype)
        arenas.append(arena)
        for number, name in enumerate(names):
            arena[2 * number] = held[name].reshape(-1)
            held[name] = arena[2 * number].reshape(held[name].shape)
        return held

    retire = WeightSending._retire

    async def late(self: Any, posted: Any) -> None:
        for arena in arenas:
            arena[1::2] += 1
        await retire(self, posted)

    monkeypatch.setattr(WeightSending, "_retire", late)

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", given=in_arena) as fixture:
            await fixture.bring(1)
            fixture.change(1)
            await fixture.bring(2)
            assert arenas[0][1].any()

    run(body)
