"""INV-1 by time: counters of one imm open and close while signals for them are late. None counts for a later counter.

Short by default; ASYNCFABRIC_TEST_GENERATIONS=10000 makes it long, and ASYNCFABRIC_TEST_STORM_RAILS names other rails,
`verbs` in the soft-RoCE machine. Interleavings are chosen in native/tests/engine/engine_closings_test.cc.
"""

from __future__ import annotations

import os
import random

import anyio
import pytest

import asyncfabric as af

GENERATIONS = int(os.environ.get("ASYNCFABRIC_TEST_GENERATIONS", "150"))
RAILS = os.environ.get("ASYNCFABRIC_TEST_STORM_RAILS", "local,tcp,fault+local?reorder=8&delay_us=200").split(",")
IMM, SIGNALS = 4711, 12


@pytest.mark.parametrize("rail", RAILS)
def test_no_late_signal_counts_for_a_later_counter(rail: str) -> None:
    anyio.run(_storm, rail, backend="trio")


async def _storm(rail: str) -> None:
    chosen = random.Random(1)
    rails = (rail, rail) if rail in ("local", "tcp") else (rail,)
    async with (
        af.open_fabric(af.FabricConfig(rails=rails)) as target,
        af.open_fabric(af.FabricConfig(rails=rails)) as writer,
    ):
        peer = await writer.connect(target.address)
        late = 0
        for _ in range(GENERATIONS):
            with await target.open_counter(IMM) as counter:
                late += counter.value
                for _ in range(SIGNALS):
                    writer.signal(peer, IMM)
                await counter.wait(chosen.randrange(SIGNALS + 1))
        with await target.open_counter(IMM) as counter:
            assert (late, counter.value) == (0, 0)
            await writer.signal(peer, IMM)
            assert await counter.wait(1) == 1
        statistics = target.statistics()
        assert statistics.immediates_received == GENERATIONS * SIGNALS + 1
