"""vLLM's managers and prepare/finalize classes for DeepEP, unmodified, over the face in the place of deep_ep."""

from __future__ import annotations

from pathlib import Path

from rank_programs import run_ranks

CASES = 2 + 6 + 1


def test_both_kinds_of_calls_give_what_experts_make(tmp_path: Path) -> None:
    for first, *cases in run_ranks(Path(__file__).parent / "expert_rank.py", 2, tmp_path / "meeting"):
        assert first == {"module": "asyncfabric.integrations.deep_ep.buffer", "one_handle": True}
        assert len(cases) == CASES and [case for case in cases if case["wrong"]] == []
