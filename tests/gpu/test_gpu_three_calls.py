"""Weights in three calls on GPUs: two ranks of a training, and an engine with a captured graph."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

MEMBER = Path(__file__).parent / "programs" / "three_calls_member.py"
TRAINERS, VERSIONS = 2, 4


def run_members(device: str, engine_device: str, rail: str, engine_rail: str, shadow: str) -> list[str]:
    """Run all members to their end; return what each printed, the engine's last."""
    with ExitStack() as stack:

        def start(role: str, rank: int, port: str, *more: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(MEMBER), role, str(rank), str(TRAINERS), str(VERSIONS), port, *more]
            one = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(one.wait)
            stack.callback(one.kill)
            return one

        members = [start("trainer", 0, "0", device, rail, shadow)]
        assert members[0].stdout is not None
        port = members[0].stdout.readline().strip()
        members += [start("trainer", rank, port, device, rail, shadow) for rank in range(1, TRAINERS)]
        members.append(start("engine", 0, port, engine_device, engine_rail, shadow))
        printed = [one.communicate(timeout=150)[0] for one in reversed(members)][::-1]
    assert [one.returncode for one in members] == [0] * len(members), "\n".join(printed)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shadow", "rail"), [("device", "auto"), ("device", "cuda"), ("host", "auto"), ("none", "auto")], ids=str
)
def test_versions_come_into_tensors_that_a_graph_reads(far: int, shadow: str, rail: str) -> None:
    rails = [rail if rail == "auto" else f"cuda:{gpu}" for gpu in (0, far)]
    *_, engine = run_members("cuda:0", f"cuda:{far}", rails[0], rails[1], shadow)
    assert f"engine: version {VERSIONS} is right" in engine
