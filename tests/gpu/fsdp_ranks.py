"""The ranks of a training that serves what it trains, as processes, over gloo or NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

VERSIONS = 3


def run_ranks(kind: str, device: str, ranks: int) -> list[tuple[int, str]]:
    """Return how each rank ended, and what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).with_name("fsdp_rank.py")), kind, device, str(VERSIONS)]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | variables | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        stated = [process.communicate(timeout=180)[0] for process in started]
        return [(process.returncode, words) for process, words in zip(started, stated, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()
