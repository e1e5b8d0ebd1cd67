"""fabric.why(): who waits for what, what is missing, from whom; as values and as text for people."""

from __future__ import annotations

from time import monotonic

import anyio
import pytest
from fabrics import open_pair, settled

import asyncfabric as af
from asyncfabric.observe import format_waiting


def test_an_idle_fabric_reports_it() -> None:
    assert format_waiting([]) == "nobody waits for anything"


def test_a_line_states_what_have_need_whom_and_how_long() -> None:
    line = af.Waiting("wait(<ImmCounter 5>)", "arrivals of imm 5", 3, 8, ("peer 1", "peer 2"), monotonic() - 2)
    text = format_waiting([line, af.Waiting("send", "room", 0, 1)])
    first, second = text.splitlines()
    assert first.startswith("wait(<ImmCounter 5>) waits for arrivals of imm 5: 3 of 8, from peer 1, peer 2, for 2.0")
    assert second == "send waits for room: 0 of 1"


@pytest.mark.anyio
async def test_everything_that_waits_has_a_line() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        peer = await p.writer.connect(p.reader.address)
        counter = p.writer.counter(5)
        transfer = p.writer.write(p.source[:64], p.key, 0)
        tasks.start_soon(counter.wait, 3, [peer])
        tasks.start_soon(transfer.settle)
        await settled()
        lines = {line.waits_for: line for line in p.writer.why()}
        assert len(lines) == 2
        waiting = lines["arrivals of imm 5"]
        assert (waiting.have, waiting.need, len(waiting.missing_from)) == (0, 3, 1)
        assert 0 < waiting.since <= monotonic()
        moving = lines["the last work requests"]
        assert (moving.have, moving.need, moving.detail["outstanding"]) == (64, 64, 1)
        text = p.writer.why_text()
        assert "write of 64 bytes" in text and "0 of 3" in text
        tasks.cancel_scope.cancel()
        p.network.release()
    assert transfer.done


@pytest.mark.anyio
async def test_what_ended_leaves_no_line() -> None:
    async with open_pair() as p:
        transfer = p.writer.write(p.source, p.key, 0)
        await transfer
        assert p.writer.why() == [] and transfer.waiting() == []
        assert p.writer.why_text() == "nobody waits for anything"
