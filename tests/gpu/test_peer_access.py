"""GPUs that cannot reach each other: every way to the other's memory is refused in words, and the rest goes on.

The machine of the test has peer access; the driver's answers of one that has not come from no_peer_access.c.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NO TEST OF MISSING PEER ACCESS WAS RUN: no C compiler")
    library = tmp_path_factory.mktemp("driver") / "no_peer_access.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, HERE / "no_peer_access.c", "-ldl"],
        check=True,
    )
    return library


def _answers(driver: Path, far: int, stated: bool) -> subprocess.Popen[str]:
    environment = os.environ | {"LD_PRELOAD": str(driver)} | ({"PEER_ACCESS_STATED": "1"} if stated else {})
    command = [sys.executable, str(HERE / "unreachable.py"), f"cuda:{far}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.alone
def test_gpus_without_peer_access(driver: Path, far: int) -> None:
    """Once where the driver refuses access, once where it states that there is access and then refuses."""
    programs = [_answers(driver, far, stated) for stated in (False, True)]
    try:
        ends = [(*program.communicate(timeout=120), program.returncode) for program in programs]
    finally:
        for program in programs:
            program.kill()
    for out, errors, code in ends:
        assert code == 0, errors
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["what"] for line in lines] == ["neighbour", "handle", "handle", "legacy", "host"]
        for line in lines[:-1]:
            if line["what"] == "neighbour" and far == 0:
                continue  # one GPU reaches itself
            assert line["kind"] == "TransferError", line
            assert "cuda:0" in line["text"] and "nvidia-smi topo -p2p w" in line["text"], line
        assert lines[-1]["kind"] == "", lines[-1]
