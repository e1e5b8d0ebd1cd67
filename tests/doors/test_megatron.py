"""Megatron's fused dispatch and combine over the face in the place of deep_ep: sums, and all gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_programs import run_ranks

FURTHEST = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2}
"""From all experts in one process, which compute in fp32: a part of the length."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_and_gradients_are_those_of_all_experts_in_one_process(tmp_path: Path, ranks: int) -> None:
    for lines in run_ranks(Path(__file__).parent / "programs" / "megatron_rank.py", ranks, tmp_path / "meeting"):
        assert [line["dtype"] for line in lines] == list(FURTHEST)
        for line in lines:
            assert all(0 < far < FURTHEST[line["dtype"]] for far in line["far"]), line
