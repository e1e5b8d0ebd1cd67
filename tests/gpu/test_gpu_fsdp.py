"""A training by FSDP2 over NCCL on two GPUs, each of which serves a rank of the replica that it updates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = 3


def run_ranks(kind: str, device: str, ranks: int) -> list[tuple[int, str]]:
    """Return how each rank ended, and what it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).with_name("fsdp_rank.py")), kind, device, str(VERSIONS)]
    started = [
        subprocess.Popen(
            command, env=os.environ | variables | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=180)[0] for process in started]
        return [(process.returncode, words) for process, words in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()


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
