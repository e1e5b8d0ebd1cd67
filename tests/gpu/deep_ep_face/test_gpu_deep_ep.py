"""DeepEP's interface on GPU tensors, ranks in processes that share the GPUs: all cases, a rank that stays away, a kill.

ASYNCFABRIC_MOE_STEPS replays of each graph: 1,000 in the long form, which has also 2, 4 and 6 ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from deep_ep_rank import SHORT_DEADLINE_S, deep_ep_ranks

STEPS = int(os.environ.get("ASYNCFABRIC_MOE_STEPS", "100"))
LONG = STEPS >= 1000
LOST = 1
KINDS = ("bfloat16", "float32", "fp8")
TRAININGS = ((1, -1, -1), (2, 1, 0), (8, 0, -1))
CASES: tuple[tuple[Any, ...], ...] = (
    *(("low", top_k, kind, empty, kind != "float32") for kind in KINDS for top_k, empty in ((1, -1), (4, 1), (10, 0))),
    ("low", 4, "fp8", 0, False),
    *(("other_scales", *shape) for shape in ((7168, 24, True), (16384, 23, False), (256, 5, True))),
    ("mantissas",),
    *(("cast_before", block, empty) for block, empty in ((128, -1), (64, 1))),
    ("packed",),
    ("overlap",),
    ("waits",),
    ("graph", False, STEPS),
    ("graph", True, STEPS),
    ("refused",),
    *(("normal", top_k, kind, empty) for top_k, kind, empty in zip((1, 4, 10), KINDS, (-1, 1, 0), strict=True)),
    ("normal", 4, "fp8", -1),
    ("left_alone",),
    ("worst",),
    ("full",),
    ("streams",),
    *(("elastic", top_k, kind, empty) for top_k, kind, empty in zip((1, 4, 10), KINDS, (-1, 1, 0), strict=True)),
    ("elastic", 4, "fp8", -1),
    ("elastic_once",),
    ("elastic_streams",),
    ("elastic_graph", False, STEPS),
    ("elastic_graph", True, STEPS),
    *(("gradients", top_k, kind, empty, idle) for kind in KINDS[:2] for top_k, empty, idle in TRAININGS),
    *(("gradients", 3, kind, -1, -1, True) for kind in KINDS[:2]),
    ("losses", 200),
    ("right_steps", ()),
)


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [3, *((2, 4, 6) if LONG else ())])
def test_all_cases_are_right_to_the_bit(ranks: int, tmp_path: Path) -> None:
    with deep_ep_ranks(ranks, tmp_path) as found:
        for case in CASES:
            found.do(*case)
        found.leave()


@pytest.mark.skipif(not LONG, reason="A RANK THAT STAYS AWAY WAS NOT TESTED: it is part of the long form")
@pytest.mark.alone
def test_a_rank_that_stays_away_is_named_by_the_mask_calls_and_the_others_go_on(tmp_path: Path) -> None:
    with deep_ep_ranks(3, tmp_path, gpu_deadline_s=SHORT_DEADLINE_S) as found:
        found.do("right_steps", ())
        found.do("missed", LOST, True)


@pytest.mark.alone
def test_a_killed_rank_is_named_by_the_mask_calls_and_the_others_go_on(tmp_path: Path) -> None:
    with deep_ep_ranks(3, tmp_path, gpu_deadline_s=SHORT_DEADLINE_S) as found:
        found.do("right_steps", ())
        lost = found.ranks.pop(LOST)
        lost.process.kill()
        lost.process.join()
        found.do("missed", LOST, False)


@pytest.mark.alone
def test_ranks_of_other_hosts_are_reached_by_the_proxy(tmp_path: Path) -> None:
    with deep_ep_ranks(2, tmp_path, hosts=[0, 1]) as found:
        found.do("normal", 4, "bfloat16", -1)
        found.leave()
