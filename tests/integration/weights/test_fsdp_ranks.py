"""A training by FSDP2 over gloo, each process of which serves a rank of the replica that it updates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "gpu"))

from fsdp_ranks import VERSIONS, run_ranks


@pytest.mark.slow
def test_fsdp2_over_gloo_serves_what_it_trained() -> None:
    """Ranks with unequal parts, blocks that both hold a part of, rows and columns that cross between them both ways."""
    for rank, (ended, text) in enumerate(run_ranks("block+causal", "cpu", 2)):
        assert ended == 0, text
        assert text.count(f"rank {rank}: version {VERSIONS} is right") == 2, text
        assert str((193 - rank, 512)) in text
