"""A program written for DeepEP's interface, as real processes on a gloo group; nobody destroys a buffer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed", reason="the ranks meet over torch.distributed")

from availability import need
from processes import Process

PATIENCE_S = 120.0
RAILS = ("local", "tcp")


@pytest.mark.slow
def test_a_program_for_deep_ep_runs_over_each_rail_and_ends(tmp_path: Path) -> None:
    need(*RAILS)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Process("deep_ep_rank.py", str(rank), "2", str(tmp_path / "meeting"), *RAILS))
            for rank in range(2)
        ]
        for rail in RAILS:
            for rank in ranks:
                answer = rank.receive(PATIENCE_S)
                assert answer == {"rail": rail, "counted": True, "normal": True, "low_latency": True}
        assert [rank.child.wait(PATIENCE_S) for rank in ranks] == [0, 0]
