"""The simulation against arithmetic that fits in the head, and the bounds that no assumption may break."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.sim import Assumptions, VirtualClock, predict, workload_of
from asyncfabric.sim.rails import share
from asyncfabric.weights import (
    Mesh,
    Move,
    Relay,
    ReplicaLayout,
    Shard,
    TrainerLayout,
    alone,
    card,
    moves_between,
    place,
    plan_weights,
)

GB = 1_000_000_000


def big_move(trainers: int, receivers: int, name: str = "w", length: int = GB) -> Move:
    source = place((length,), Mesh.of({"t": trainers}), {"t": Shard(0)})
    target = alone(place((length,), Mesh.of({"r": receivers}), {"r": Shard(0)}))
    return Move(name, "uint8", source, name, "uint8", target)


def plan_of(moves, trainers: int, receivers: int, replicas: int = 1, relay=None):
    names = [f"r{number}" for number in range(replicas)]
    return plan_weights(moves, trainers=trainers, receivers=receivers, replicas=names, relay=relay)


IDEAL = Assumptions(
    rail_efficiency=1.0,
    message_us=0.0,
    skew_s=0.0,
    commit_s=0.0,
    verify_gbytes_per_s=1e6,
    bring_gbytes_per_s=1e4,
    convert_gbytes_per_s=1e4,
    watermark_bytes=1 << 40,
)


def test_one_gigabyte_over_one_rail_takes_its_time() -> None:
    found = predict(plan_of([big_move(1, 1)], 1, 1), IDEAL)
    assert found.predicted_s == pytest.approx(1 / 50, abs=4 * IDEAL.step_s)
    assert found.floor_s == found.placement_floor_s == pytest.approx(1 / 50)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"bring_gbytes_per_s": 10.0}, 1 / 10),
        ({"convert_gbytes_per_s": 8.0}, 1 / 8),
        ({"rail_gbits_per_s": 80.0}, 1 / 10),
        ({"rail_efficiency": 0.25}, 4 / 50),
        ({"commit_s": 0.5}, 0.5 + 1 / 50),
        ({"verify_gbytes_per_s": 2.0}, 1 / 2),
        ({"message_us": 1000.0}, 239 * 0.001),  # a write of 4 MiB each, of which each keeps the rail for 1 ms
    ],
)
def test_the_slowest_stage_decides(changes: dict[str, float], seconds: float) -> None:
    assumed = Assumptions(**{**{name: getattr(IDEAL, name) for name in IDEAL.__struct_fields__}, **changes})
    found = predict(plan_of([big_move(1, 1)], 1, 1), assumed)
    assert found.predicted_s == pytest.approx(seconds, abs=0.02 * seconds + 5 * IDEAL.step_s)


def test_weights_that_are_on_the_device_need_not_be_brought() -> None:
    slow = {name: getattr(IDEAL, name) for name in IDEAL.__struct_fields__} | {"bring_gbytes_per_s": 2.0}
    plan = plan_of([big_move(1, 1)], 1, 1)
    assert predict(plan, Assumptions(**slow)).predicted_s > 0.4
    assert predict(plan, Assumptions(**(slow | {"offloaded": False}))).predicted_s < 0.03


def test_trees_beat_sending_each_copy_from_the_source() -> None:
    direct = predict(plan_of([big_move(1, 1)], 1, 1, replicas=4), IDEAL)
    chained = predict(plan_of([big_move(1, 1)], 1, 1, replicas=4, relay=Relay(0, 1)), IDEAL)
    assert direct.predicted_s == pytest.approx(4 / 50, abs=0.005)
    assert chained.predicted_s == pytest.approx(1 / 50, abs=0.008)
    assert direct.floor_s == pytest.approx(4 / 50) and chained.floor_s == pytest.approx(1 / 50)


def test_no_replica_forwards_what_it_has_not_got() -> None:
    slow = {name: getattr(IDEAL, name) for name in IDEAL.__struct_fields__} | {"bring_gbytes_per_s": 10.0}
    found = predict(plan_of([big_move(1, 1)], 1, 1, replicas=3, relay=Relay(0, 1)), Assumptions(**slow))
    got = np.cumsum(found.activity["receive"], axis=0)
    assert (np.diff(got, axis=1) <= 1e-4).all()
    assert np.allclose(got[-1], got[-1, 0], rtol=1e-4)


def test_receivers_of_one_node_forward() -> None:
    source = place((GB,), Mesh.of({"t": 8}), {"t": Shard(0)})
    move = Move("w", "uint8", source, "w", "uint8", alone(place((GB,), Mesh.of({"r": 4}))))
    direct = predict(plan_of([move], 8, 4), IDEAL)
    relayed = predict(plan_of([move], 8, 4, relay=Relay(4, 0)), IDEAL)
    assert direct.predicted_s == pytest.approx(1 / 50, abs=0.005)
    assert relayed.predicted_s == pytest.approx(1 / 50 / 4, abs=0.006)
    assert relayed.stages()["forward"].busy_max_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("relay", [None, Relay(4, 0), Relay(0, 1)])
def test_bounds_hold_whatever_is_planned(relay: Relay | None) -> None:
    moves = moves_between(card("tiny"), TrainerLayout(stages=2, fsdp=2, ep=2), ReplicaLayout(ranks=4, tp=2, fp8=True))
    moves += [big_move(8, 4, f"more.{number}", GB // 4) for number in range(8)]
    plan = plan_of(moves, 8, 4, replicas=3, relay=relay)
    assumed = Assumptions(watermark_bytes=32 << 20, unit_bytes=8 << 20)
    found, work = predict(plan, assumed), workload_of(plan, assumed)
    assert found.predicted_s > found.placement_floor_s >= found.floor_s * 0.999
    assert found.peak_scratch_bytes <= assumed.watermark_bytes
    rate = assumed.rail_bytes_per_s * assumed.step_s
    assert found.activity["write"].max() <= 1 + 1e-6 and found.activity["receive"].max() <= 1 + 1e-6
    wrote = found.activity["write"].astype(float).sum(axis=0) * rate
    assert np.allclose(wrote, work.written, rtol=1e-4, atol=1000)
    got = found.activity["receive"].astype(float).sum(axis=0) * rate
    assert np.allclose(got, work.fed, rtol=1e-4, atol=1000)
    assert predict(plan, assumed).predicted_s == found.predicted_s


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_ports_are_shared_and_never_exceeded(senders: int, receivers: int, random) -> None:
    draw = np.random.default_rng(random.randrange(1 << 30))
    waiting = draw.integers(0, 1000, (senders, receivers)) * draw.integers(0, 2, (senders, receivers)) * 1.0
    sends, receives = draw.integers(1, 1500, senders) * 1.0, draw.integers(1, 1500, receivers) * 1.0
    moved = share(waiting, sends, receives)
    assert (moved >= 0).all() and (moved <= waiting + 1e-6).all()
    assert (moved.sum(axis=1) <= sends + 1e-6).all() and (moved.sum(axis=0) <= receives + 1e-6).all()
    if senders == 1:
        assert moved.sum() >= 0.9 * min(sends[0], np.minimum(waiting[0], receives).sum()) - receivers


def test_spans_are_where_a_rank_was_busy() -> None:
    found = predict(plan_of([big_move(1, 1)], 1, 1), IDEAL)
    (span,) = found.spans("write", 0)
    assert 0 < span.begin_s < span.end_s <= found.predicted_s


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rail_gbits_per_s": 0.0}, "rail_gbits_per_s must be above 0"),
        ({"rail_efficiency": 1.5}, "at most 1"),
        ({"watermark_bytes": 1 << 20}, "does not fit under"),
    ],
)
def test_absurd_assumptions_are_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Assumptions(**changes)


def test_nothing_to_simulate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no replica"):
        predict(plan_of([big_move(1, 1)], 1, 1, replicas=0))
    with pytest.raises(ValueError, match="longer than 0 s"):
        VirtualClock(0.0)
