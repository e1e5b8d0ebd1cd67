"""Placements as torch would make them, targets, and what is refused before anything is planned."""

from __future__ import annotations

import numpy as np
import pytest

from asyncfabric.weights import (
    Mesh,
    Move,
    Placement,
    Replicate,
    Shard,
    alone,
    boxes,
    fused,
    place,
    plan_weights,
    stacked,
)

ONE = Mesh.of({"rank": 1})


def lengths(placement: Placement, dim: int) -> list[int]:
    return placement.sizes[:, dim].tolist()


@pytest.mark.parametrize(("length", "ranks"), [(8, 4), (9, 4), (5, 4), (2, 4), (1, 3), (7, 7)])
def test_shards_are_cut_as_torch_chunk_cuts(length: int, ranks: int) -> None:
    torch = pytest.importorskip("torch")
    placement = place((length, 3), Mesh.of({"fsdp": ranks}), {"fsdp": Shard(0)})
    assert lengths(placement, 0) == [len(chunk) for chunk in torch.arange(length).chunk(ranks)]
    assert placement.starts[:, 0].tolist() == [int(chunk[0]) for chunk in torch.arange(length).chunk(ranks)]


def test_two_axes_cut_one_dimension_in_the_order_of_the_mesh() -> None:
    placement = place((12,), Mesh.of({"dp": 2, "tp": 3}, first_rank=10), {"dp": Shard(0), "tp": Shard(0)})
    assert placement.ranks.tolist() == [10, 11, 12, 13, 14, 15]
    assert placement.starts[:, 0].tolist() == [0, 2, 4, 6, 8, 10]


def test_part_of_a_mesh_keeps_its_ranks() -> None:
    mesh = Mesh.of({"fsdp": 2, "ep": 4})
    placement = place((4,), mesh.at("ep", 3), {"fsdp": Shard(0)})
    assert placement.ranks.tolist() == [3, 7]
    with pytest.raises(ValueError, match="no ep=4"):
        mesh.at("ep", 4)


def test_cells_of_overlapping_boxes_name_all_holders() -> None:
    placement = boxes((10,), {0: ([0], [10]), 1: ([4], [3]), 5: ([6], [4])})
    cells = placement.cells
    assert cells.starts[:, 0].tolist() == [0, 4, 6, 7]
    assert cells.holders == [(0,), (0, 1), (0, 1, 5), (0, 5)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: place((4,), ONE, {"tp": Shard(0)}), r"axes \('rank',\), not \['tp'\]"),
        (lambda: place((4,), ONE, {"rank": Shard(1)}), "no such dimension"),
        (lambda: boxes((4,), {0: ([2], [3])}), "rank 0 holds .* not within"),
        (lambda: boxes((4,), {0: ([0], [0])}), "rank 0 holds"),
        (lambda: Mesh.of({"a": 0}), "1 or more"),
        (lambda: alone(place((4, 4), ONE), axes=(0, 0)), "distinct"),
        (lambda: fused([place((4,), ONE), place((4,), Mesh.of({"a": 2}))]), "same ranks"),
        (lambda: fused([place((4, 2), ONE), place((4, 3), ONE)]), "agree in all dimensions but 0"),
        (lambda: stacked(alone(place((4,), ONE)), np.array([2]), 2), "leaves the local tensor"),
    ],
)
def test_impossible_placements_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def move(source: Placement, target, *, region: str = "t", to: str = "bfloat16", block: int = 0) -> Move:
    return Move("w", "bfloat16", source, region, to, target, block)


def planned(*moves: Move, trainers: int = 2, receivers: int = 2):
    return plan_weights(moves, trainers=trainers, receivers=receivers, replicas=["r"])


def test_what_nobody_holds_is_named() -> None:
    half = boxes((4,), {0: ([0], [2])})
    with pytest.raises(ValueError, match=r"rank 0 of the replica wants .* trainers hold 2 of 4"):
        planned(move(half, alone(place((4,), ONE))))


def test_bytes_written_twice_or_never_are_named() -> None:
    whole, target = place((4,), ONE), alone(place((4,), ONE))
    with pytest.raises(ValueError, match="t: two moves write the same elements at rank 0"):
        planned(move(whole, target), move(whole, target))
    first, _ = fused([place((4,), ONE), place((3,), ONE)])
    with pytest.raises(ValueError, match="t: moves write 4 of its 7 elements at rank 0"):
        planned(move(whole, first))
    with pytest.raises(ValueError, match="t: moves disagree about its type"):
        planned(move(whole, first), move(place((4,), ONE), target, to="float32"))


def test_ranks_out_of_range_are_named() -> None:
    far = place((4,), Mesh.of({"rank": 1}, 7))
    with pytest.raises(ValueError, match="rank 7 is not one of 2 trainers"):
        planned(move(far, alone(place((4,), ONE))))
    with pytest.raises(ValueError, match="rank 7 is not one of 2 receivers"):
        planned(move(place((4,), ONE), alone(far)))


def test_replicas_must_not_cut_blocks() -> None:
    whole = place((256, 256), ONE)
    cut = place((256, 256), Mesh.of({"tp": 4}), {"tp": Shard(0)})
    with pytest.raises(ValueError, match="cuts blocks of 128; shard t at multiples of 128"):
        planned(move(whole, alone(cut), to="float8_e4m3fn", block=128), receivers=4)
    small = place((72, 256), ONE)
    parts = fused([small, whole])
    with pytest.raises(ValueError, match="cuts blocks of 128"):
        planned(
            move(small, parts[0], to="float8_e4m3fn", block=128), move(whole, parts[1], to="float8_e4m3fn", block=128)
        )


def test_replicate_is_what_is_not_stated() -> None:
    mesh = Mesh.of({"a": 2, "b": 2})
    stated = place((4,), mesh, {"a": Shard(0), "b": Replicate()})
    assert stated.digest == place((4,), mesh, {"a": Shard(0)}).digest
    assert stated.digest != place((4,), mesh, {"b": Shard(0)}).digest


@pytest.mark.parametrize(
    ("shape", "start", "words"),
    [((1 << 64,), 0, "sides of a tensor"), ((8,), (1 << 63) - 2, "not within the tensor's")],
)
def test_numbers_beyond_int64_are_refused(shape: tuple[int, ...], start: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Placement(shape, np.array([0]), np.array([[start]]), np.array([[4]]))
