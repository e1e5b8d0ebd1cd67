"""Placements against torch's own arithmetic of DTensor, on meshes of two axes; FSDP2 over tensor parallelism too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from asyncfabric.weights import Mesh, Placement, Replicate, Shard, place

theirs = pytest.importorskip("torch.distributed.tensor", reason="NOT COMPARED WITH DTENSOR: torch is not installed")
local_box = getattr(theirs._utils, "_compute_local_shape_and_global_offset", None)
pytestmark = pytest.mark.skipif(local_box is None, reason="NOT COMPARED WITH DTENSOR: this torch has another function")

RULES = [Replicate(), Shard(0), Shard(1)]
SHAPES = [(12, 5), (7, 3), (1, 9), (2, 2)]


def check(placement: Placement, shape: Any, mesh: Mesh, rules: list[Any], sizes: tuple[int, int]) -> None:
    for index, coordinate in enumerate(itertools.product(range(sizes[0]), range(sizes[1]))):
        size, start = local_box(shape, sizes, list(coordinate), rules)
        rank = int(mesh.ranks.reshape(-1)[index])
        if 0 in size:
            assert rank not in placement.ranks.tolist()
            continue
        row = placement.row_of(rank)
        assert (tuple(placement.starts[row]), tuple(placement.sizes[row])) == (tuple(start), tuple(size)), coordinate


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", list(itertools.product(RULES, RULES)))
def test_boxes_are_those_of_dtensor(shape: tuple[int, int], rules: tuple[Any, Any]) -> None:
    mesh = Mesh.of({"a": 2, "b": 3})
    as_torch = [theirs.Shard(rule.dim) if isinstance(rule, Shard) else theirs.Replicate() for rule in rules]
    check(place(shape, mesh, dict(zip("ab", rules, strict=True))), shape, mesh, as_torch, (2, 3))


@pytest.mark.parametrize("shape", [(12, 5), (24, 2), (6, 1)])
def test_fsdp_over_tensor_parallelism_cuts_the_other_way_round(shape: tuple[int, int]) -> None:
    strided = pytest.importorskip("torch.distributed.tensor.placement_types")._StridedShard
    mesh = Mesh.of({"dp": 2, "tp": 3})
    turned = Mesh(("tp", "dp"), mesh.ranks.T)
    ours = place(shape, turned, {"tp": Shard(0), "dp": Shard(0)})
    check(ours, shape, mesh, [strided(0, split_factor=3), theirs.Shard(0)], (2, 3))
