"""What a trainer may give as its shards, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

from asyncfabric.weights import Mesh, Move, Plan, Shard, alone, place, plan_weights
from asyncfabric.weights.sender.shards import Shards


def plan() -> Plan:
    whole = place((4, 4), Mesh.of({"fsdp": 2}), {"fsdp": Shard(0)})
    moves = [
        Move(name, "float32", whole, name, "float32", alone(place((4, 4), Mesh.of({"tp": 1})))) for name in ("a", "b")
    ]
    return plan_weights(moves, trainers=2, receivers=1, replicas=())


def given(**more: Any) -> dict[str, Any]:
    return {"a": np.zeros((2, 4), np.float32), "b": np.zeros((2, 4), np.float32)} | more


def test_arrays_and_functions_are_taken() -> None:
    shards = Shards(plan(), 0, given(b=lambda box: np.zeros((2, 4), np.float32)[box]))
    assert shards.box("a", (0, 0), (2, 4)).shape == shards.box("b", (0, 0), (2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (np.float32(1), r"b of rank 1 must be an array .* got float32 of shape \(\); give the array"),
        (1.5, r"b of rank 1 must be an array .* got float$"),
        ([1.5], r"b of rank 1 must be an array .* got list$"),
    ],
)
def test_what_is_no_memory_is_refused(held: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Shards(plan(), 1, given(b=held))


def test_shards_that_the_plan_does_not_have_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rank 1 was given shards of 2 parameters .* have: 'c', 'd'; it has 2, such as 'a', 'b'"
    ):
        Shards(plan(), 1, given(c=np.zeros(1, np.float32), d=np.float32(1)))


def test_a_shard_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 holds a part of b"):
        Shards(plan(), 1, {"a": np.zeros((2, 4), np.float32)})
