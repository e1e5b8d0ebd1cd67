"""Plans for random placements: each byte of a replica is written once, by the right byte; senders share the load."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_cases import Case, cases, expected_tensors

from asyncfabric.weights.plan.assignment import join_replica, leave_replica
from asyncfabric.weights.plan.execute import ReplicaMemory, execute
from asyncfabric.weights.plan.parts import Relay
from asyncfabric.weights.plan.plan import Plan, from_bytes, to_bytes
from asyncfabric.weights.plan.planner import plan_weights

RELAYS = st.builds(Relay, st.integers(0, 3), st.integers(0, 2))


def planned(case: Case, relay: Relay | None = None, chunk_bytes: int = 64) -> Plan:
    names = [f"replica {number}" for number in range(case.replicas)]
    return plan_weights(
        case.moves,
        trainers=case.trainers,
        receivers=case.receivers,
        replicas=names,
        relay=relay,
        chunk_bytes=chunk_bytes,
    )


def check_execution(case: Case, plan: Plan) -> None:
    memory = ReplicaMemory(plan)
    execute(plan, case.shard, memory)
    expected = expected_tensors(case, plan)
    assert {key[1:] for key in memory.tensors} == set(expected)
    for key, tensor in memory.tensors.items():
        assert (memory.counts[key] == 1).all(), f"{key}: bytes were written {np.unique(memory.counts[key])} times"
        assert np.array_equal(tensor, expected[key[1:]]), f"{key}: wrong bytes"
    for one in plan.replicas:
        for receiver in range(plan.receivers):
            reported = plan.expected(one.name, receiver)
            wrote = {key[2]: count for key, count in memory.writes.items() if key[:2] == (one.name, receiver)}
            assert dict(zip(reported.senders.tolist(), reported.writes.tolist(), strict=True)) == wrote
            assert int(reported.length_bytes.sum()) == sum(plan.region_bytes(receiver).values())


@pytest.mark.slow
@settings(max_examples=60)
@given(cases(), RELAYS, st.integers(1, 200))
def test_each_byte_is_written_once_by_the_right_byte(case: Case, relay: Relay, chunk_bytes: int) -> None:
    """INV WT-1."""
    check_execution(case, planned(case, relay, chunk_bytes))


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(quantised=True), RELAYS, st.sampled_from([1 << 10, 1 << 14, 1 << 20]))
def test_quantising_shards_equals_quantising_the_whole(case: Case, relay: Relay, chunk_bytes: int) -> None:
    """INV WT-2: shards cut blocks anywhere, the bits are those of the whole tensor."""
    check_execution(case, planned(case, relay, chunk_bytes))


def least_possible(groups: list[tuple[int, ...]], loads: Any, trainers: int) -> float:
    """The smallest largest load, if bytes could be divided at will: no set of ranks can hand its own work to others."""
    ranks = range(trainers)
    return max(
        sum(load for group, load in zip(groups, loads, strict=True) if set(group) <= set(chosen)) / len(chosen)
        for size in range(1, trainers + 1)
        for chosen in itertools.combinations(ranks, size)
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(cases(), st.integers(1, 3))
def test_senders_share_the_load_as_far_as_placements_allow(case: Case, replicas: int) -> None:
    """INV WT-3: within 5 percent of the best that any choice of senders could do, give or take one piece."""
    case.replicas = replicas
    plan = planned(case, chunk_bytes=4)
    weights = plan.piece_bytes[plan.row_piece]
    per_group = np.bincount(plan.piece_group[plan.row_piece], weights=weights, minlength=len(plan.groups)) * replicas
    best = least_possible(list(plan.groups), per_group, case.trainers)
    shared = sum(len(group) > 1 for group in plan.groups)
    assert plan.bytes_sent().max() <= 1.05 * best + replicas * shared * int(weights.max())
    assert plan.bytes_sent().sum() == weights.sum() * replicas


@pytest.mark.slow
@given(cases(), RELAYS, st.data())
def test_who_joins_or_leaves_changes_nothing_for_the_others(case: Case, relay: Relay, data: Any) -> None:
    """INV WT-4."""
    plan = planned(case, relay)
    joined = join_replica(plan, "late")
    assert joined.replicas[:-1] == plan.replicas
    names = [one.name for one in joined.replicas]
    fresh = plan_weights(
        case.moves, trainers=case.trainers, receivers=case.receivers, replicas=names, relay=relay, chunk_bytes=64
    )
    assert fresh.digest == joined.digest
    gone = data.draw(st.sampled_from(names))
    left = leave_replica(joined, gone)
    before = {one.name: one for one in joined.replicas}
    for one in left.replicas:
        assert one is before[one.name] or before[one.name].parent == gone
    assert gone not in [one.name for one in left.replicas]
    check_execution(case, left)


@given(cases(), RELAYS)
def test_plans_survive_storage_and_have_one_hash(case: Case, relay: Relay) -> None:
    plan = planned(case, relay)
    again = from_bytes(to_bytes(plan))
    assert again.digest == plan.digest == planned(case, relay).digest
    assert to_bytes(again) == to_bytes(plan)
    assert [one.senders.tolist() for one in again.replicas] == [one.senders.tolist() for one in plan.replicas]
