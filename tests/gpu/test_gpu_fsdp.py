"""A training by FSDP2 over NCCL on two GPUs, each of which serves a rank of the replica that it updates."""

from __future__ import annotations

import pytest
from fsdp_ranks import VERSIONS, run_ranks


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "causal"])
def test_fsdp2_over_nccl_serves_what_it_trained(far: int, kind: str) -> None:
    """Ranks with unequal parts, blocks that both hold a part of, rows and columns that cross the GPUs both ways."""
    if far == 0:
        pytest.skip("FSDP2 OVER NCCL WAS NOT RUN: it takes two GPUs")
    if kind == "causal":
        pytest.importorskip("transformers", reason="THE TRAINING OF THE SERVICES WAS NOT RUN ON GPUS: no transformers")
    for rank, (ended, words) in enumerate(run_ranks(kind, "cuda", 2)):
        assert ended == 0, words
        assert f"rank {rank}: version {VERSIONS} is right" in words
        assert kind == "causal" or str((193 - rank, 512)) in words
