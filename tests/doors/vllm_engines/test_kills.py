"""Some rounds of the kills at random moments; `kills.py` and `engine_kills.py` run as many as one asks for."""

from __future__ import annotations

import pytest
from engine_kills import run_kills
from kills import run_arithmetic

from nodes import PULL, PUSH


def test_nodes_that_are_killed_under_load_cost_no_wrong_answer_and_no_block() -> None:
    found = run_arithmetic(8, seed=3)
    assert sum(found["killed"].values()) == 8
    assert found["outcomes"]["answers"] >= 8, "each kill came after another answer"


@pytest.mark.parametrize("connector", [PULL, PUSH])
def test_stock_engines_that_are_killed_cost_no_wrong_text_and_no_block(connector: str) -> None:
    found = run_kills(connector, 4, seed=5)
    assert sum(found["killed"].values()) == 4
    assert found["answers"] >= 16
