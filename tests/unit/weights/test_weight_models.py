"""Model cards count what the models have; whole models are planned, carried out and compared with loading them."""

from __future__ import annotations

import itertools
from math import prod

import msgspec
import numpy as np
import pytest

from asyncfabric.sim import Assumptions, predict
from asyncfabric.weights import (
    CARDS,
    Rates,
    Relay,
    Replica,
    ReplicaLayout,
    ReplicaMemory,
    TrainerLayout,
    card,
    draw_plan,
    execute,
    from_bytes,
    imbalance,
    join_replica,
    moves_between,
    parameters,
    plan_weights,
    sent_by,
    to_bytes,
)
from asyncfabric.weights.plan.formats import block_maxima, from_float32, quantise, scales_of, to_float32

PUBLISHED = {
    "kimi-k2": 1.0264e12,
    "deepseek-v3": 671.03e9,
    "qwen3-235b-a22b": 235.094e9,
    "llama-3.1-70b": 70.5537e9,
}
"""Parameters of the published checkpoints, without those of multi-token prediction."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_cards_have_as_many_parameters_as_the_models(name: str) -> None:
    total = sum(prod(each.shape) for each in parameters(card(name)))
    assert total == pytest.approx(PUBLISHED[name], rel=2e-4)


def test_names_of_parameters_are_distinct() -> None:
    for one in CARDS.values():
        names = [each.name for each in parameters(one)]
        assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match="no model card 'gpt-5'"):
        card("gpt-5")


TINY = card("tiny")


def whole_model(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    model = {}
    for each in parameters(TINY):
        values = random.standard_normal(each.shape).astype(np.float32)
        model[each.name] = from_float32(values, "bfloat16") if each.dtype == "bfloat16" else values
    return model


def tiny_plan(trainer: TrainerLayout, replica: ReplicaLayout, relay=None, replicas: int = 2):
    moves = moves_between(TINY, trainer, replica)
    names = [f"replica {number}" for number in range(replicas)]
    plan = plan_weights(moves, trainers=trainer.ranks, receivers=replica.ranks, replicas=names, relay=relay)
    return moves, plan


def carried_out(moves, plan, model) -> ReplicaMemory:
    sources = {move.parameter: move.source for move in moves}

    memory = ReplicaMemory(plan)
    execute(plan, lambda rank, name: model[name][sources[name].box_of(rank)], memory)
    assert all((count == 1).all() for count in memory.counts.values())
    return memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "replica", "relay"),
    [
        (TrainerLayout(stages=2, fsdp=2, ep=2), ReplicaLayout(ranks=4, tp=2, fp8=True), Relay(2, 1)),
        (TrainerLayout(copies=2, fsdp=3, ep=2), ReplicaLayout(ranks=2, tp=1, fp8=True), None),
        (TrainerLayout(fsdp=5), ReplicaLayout(ranks=2, tp=2), Relay(0, 1)),
    ],
)
def test_a_replica_holds_what_loading_the_model_would_give(trainer, replica, relay) -> None:
    """Fused, stacked and quantised from whole tensors by hand, for the tensors that a forward pass multiplies with."""
    model = whole_model(3)
    moves, plan = tiny_plan(trainer, replica, relay)
    memory = carried_out(moves, plan, model)
    root = "model.layers.1.mlp.experts."
    each = TINY.experts // replica.ranks
    for name in ("replica 0", "replica 1"):
        for rank in range(replica.ranks):
            for slot in range(each):
                expert = f"{root}{rank * each + slot}."
                gate_up = np.concatenate([model[expert + "gate_proj.weight"], model[expert + "up_proj.weight"]])
                check(memory, (name, rank, root + "w13_weight"), gate_up, slot, each, replica.fp8)
                check(
                    memory,
                    (name, rank, root + "w2_weight"),
                    model[expert + "down_proj.weight"],
                    slot,
                    each,
                    replica.fp8,
                )
            column = TINY.heads * TINY.v_head_dim // replica.tp
            out = model["model.layers.0.self_attn.o_proj.weight"]
            if column % 128 == 0 or not replica.fp8:
                mine = out[:, rank % replica.tp * column : (rank % replica.tp + 1) * column]
                check(memory, (name, rank, "model.layers.0.self_attn.o_proj.weight"), mine, 0, 1, replica.fp8)


def check(memory: ReplicaMemory, key, expected, slot: int, slots: int, fp8: bool) -> None:
    if fp8:
        values = to_float32(expected, "bfloat16")
        scales = scales_of(block_maxima(values, (0, 0)))
        expected = quantise(values, scales, (0, 0))
        stored = memory.tensors[*key[:2], key[2] + "_scale_inv"].view("<f4").reshape(slots, *scales.shape)[slot]
        assert np.array_equal(stored, scales), key
    stored = memory.tensors[key].view(expected.dtype).reshape(slots, *expected.shape)[slot]
    assert np.array_equal(stored, expected), key


def test_relays_are_chosen_by_the_slowest_port() -> None:
    trainer, replica = TrainerLayout(ep=2), ReplicaLayout(ranks=4)
    few = Rates(rail_gbytes_per_s=50)
    assert tiny_plan(trainer, replica, few, replicas=8)[1].relay.width > 0
    fast_inside = Rates(rail_gbytes_per_s=50, node_gbytes_per_s=300, node_ranks=4)
    assert tiny_plan(TrainerLayout(copies=8, ep=2), replica, fast_inside, replicas=1)[1].relay == Relay(4, 0)
    slow_inside = Rates(rail_gbytes_per_s=50, node_gbytes_per_s=1, node_ranks=4)
    assert tiny_plan(TrainerLayout(copies=8, ep=2), replica, slow_inside, replicas=1)[1].relay == Relay()


def test_plans_print_as_tables() -> None:
    _, plan = tiny_plan(TrainerLayout(ep=2), ReplicaLayout(ranks=2, fp8=True))
    text = draw_plan(plan, rank=1, rows=100)
    assert plan.digest in text and "replica 1" in text and "bfloat16 -> float8_e4m3fn" in text
    assert len(text.splitlines()) == 4 + len(plan.replicas) + 2 + 100 + 1


def test_a_plan_that_was_tampered_with_is_refused() -> None:
    _, plan = tiny_plan(TrainerLayout(ep=2), ReplicaLayout(ranks=2))
    data = to_bytes(plan)
    with pytest.raises(ValueError, match="are no plan"):
        from_bytes(data[: len(data) // 2])
    fields = msgspec.msgpack.decode(data)
    with pytest.raises(ValueError, match="version 9, this program reads 1"):
        from_bytes(msgspec.msgpack.encode([9, *fields[1:]]))
    joined = join_replica(plan, "late")
    bad = plan.with_replicas([Replica("x", 0, None, plan.replicas[0].senders + 99)])
    with pytest.raises(ValueError, match="senders of x"):
        from_bytes(to_bytes(bad))
    with pytest.raises(ValueError, match="there is a replica 'late' already"):
        join_replica(joined, "late")


@pytest.mark.slow
def test_a_trillion_parameters_are_balanced_and_arrive_in_time() -> None:
    """INV WT-3 at full size: 256 trainers, four replicas of 32; and what is predicted of it."""
    moves = moves_between(card("kimi-k2"), TrainerLayout(stages=2, fsdp=16, ep=8), ReplicaLayout(ranks=32, fp8=True))
    rates = Rates(rail_gbytes_per_s=46, node_gbytes_per_s=266, node_ranks=8)
    plan = plan_weights(moves, trainers=256, receivers=32, replicas=["a", "b", "c", "d"], relay=rates)
    assert imbalance(plan.bytes_sent()) <= 1.05
    for one in plan.replicas:
        outer, inner = plan.bytes_received(one.name)
        assert imbalance(outer) <= 1.05
        assert int(outer.sum() + inner.sum()) == int(plan.sizes.length_bytes.sum())
    assert plan.relay == Relay(8, 0)
    assert plan.model_bytes == pytest.approx(1.0292e12, rel=1e-3)
    found = predict(plan, Assumptions(step_s=0.002))
    assert found.floor_s == pytest.approx(0.643, abs=0.001)
    assert found.placement_floor_s < found.predicted_s <= 0.80
    assert found.peak_scratch_bytes <= found.assumed.watermark_bytes


def test_teams_go_through_the_moves_side_by_side() -> None:
    """Ranks that share quantisation blocks begin with the same move; rows of one box stand together."""
    trainer, replica = TrainerLayout(stages=2, fsdp=3), ReplicaLayout(ranks=2, fp8=True)
    _, plan = tiny_plan(trainer, replica, replicas=3)
    assert plan.teams.tolist() == [0, 1, 2, 3, 3, 3], "only experts, of stage 1, are cut here"
    number = {name: at for at, name in enumerate(each.name for each in parameters(TINY))}
    firsts = []
    for rank in range(plan.trainers):
        batch = sent_by(plan, rank)
        assert (np.diff(batch.box) >= 0).all()
        boxes = list(zip(batch.parameter.tolist(), plan.pieces.start[batch.piece].tolist(), strict=True))
        changes = 1 + sum(before != after for before, after in itertools.pairwise(boxes))
        assert changes == len({(parameter, tuple(start)) for parameter, start in boxes})
        order = [number[plan.parameters[parameter]] for parameter in batch.parameter.tolist()]
        assert sum(after < before for before, after in itertools.pairwise(order)) <= 1, "it goes round once"
        firsts.append(order[0])
    assert firsts[3] == firsts[4] == firsts[5]
