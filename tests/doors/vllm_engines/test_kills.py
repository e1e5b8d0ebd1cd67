"""Some rounds of the kills at random moments; `kills.py` runs as many as one asks for."""

from __future__ import annotations

from kills import run_arithmetic


def test_nodes_that_are_killed_under_load_cost_no_wrong_answer_and_no_block() -> None:
    found = run_arithmetic(8, seed=3)
    assert sum(found["killed"].values()) == 8
    assert found["outcomes"]["answers"] >= 8, "each kill came after another answer"
