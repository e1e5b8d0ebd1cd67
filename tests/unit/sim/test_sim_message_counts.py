"""Messages that a prediction counts are those that the rule of updates makes, sender by sender, unit by unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.sim import Assumptions, workload_of
from asyncfabric.sim.message_counts import forwarded_messages, messages_of
from asyncfabric.weights.plan.batch import SHARES, ReportShare, begin_of
from asyncfabric_services.bench.weights.workload import plan_of

TRAINERS, RECEIVERS = 3, 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 40)), max_size=60), st.integers(1, 30))
def test_messages_are_those_of_the_rule(units: list[tuple[int, int, int]], share: int) -> None:
    units.sort(key=lambda unit: unit[0])  # each sender's in its order
    sender, receiver, size = (
        (np.array(column, np.int64) for column in zip(*units, strict=True)) if units else (np.zeros(0, np.int64),) * 3
    )
    counts = np.bincount(sender, minlength=TRAINERS)
    ends = np.cumsum(counts)
    template = workload_of(plan_of(TRAINERS, RECEIVERS, 1, 2, 256, "copy"), Assumptions())
    work = replace(
        template,
        first_entry=np.stack([ends - counts, ends], axis=1),
        entry_receiver=receiver,
        entry_bytes=size.astype(float),
        fed=np.full(RECEIVERS, float(share * SHARES)),
        gets=np.zeros(RECEIVERS),
    )
    stated, received = np.zeros(TRAINERS, int), np.zeros(RECEIVERS, int)
    for one in range(TRAINERS):
        for other in range(RECEIVERS):
            sizes = size[(sender == one) & (receiver == other)].tolist()
            rule, messages, reported = ReportShare(sum(sizes), share, begin_of(one)), 0, True
            for each in sizes:
                reported = rule.add(each)
                messages += reported
            stated[one] += messages + (not reported)
            received[other] += messages + (not reported)
    assert messages_of(work)[0].tolist() == stated.tolist() and messages_of(work)[1].tolist() == received.tolist()


def test_a_chain_sends_again_what_it_passes_on_and_others_send_nothing() -> None:
    for chain, stated in ((False, 0), (True, 3)):
        plan = plan_of(2, 1, 2, 2, 256, "copy", chain=chain)
        work = workload_of(plan, Assumptions())
        passed_on, received_on = forwarded_messages(plan, work)
        assert passed_on[1] == received_on[0] == 0 and passed_on[0] == received_on[1]
        assert bool(passed_on[0] >= stated) and (chain or not passed_on[0])


@pytest.mark.parametrize("units", [1, 20])
def test_messages_do_not_grow_with_units(units: int) -> None:
    plan = plan_of(4, 2, 1, 40, 1024, "copy")
    few = messages_of(workload_of(plan, Assumptions(unit_bytes=1 << 20)))[1].sum()
    many = messages_of(workload_of(plan, Assumptions(unit_bytes=(1 << 20) // units)))[1].sum()
    assert few <= many <= (SHARES + 6 * 4) * 2
