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


@pytest.mark.alone
@pytest.mark.parametrize("stated", [False, True], ids=["refused", "stated but refused"])
def test_gpus_without_peer_access(driver: Path, far: int, stated: bool) -> None:
    environment = os.environ | {"LD_PRELOAD": str(driver)} | ({"PEER_ACCESS_STATED": "1"} if stated else {})
    run = subprocess.run(
        [sys.executable, HERE / "unreachable.py", f"cuda:{far}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["what"] for line in lines] == ["neighbour", "handle", "handle", "legacy", "host"]
    for line in lines[:-1]:
        if line["what"] == "neighbour" and far == 0:
            continue  # one GPU reaches itself
        assert line["kind"] == "TransferError", line
        assert "cuda:0" in line["text"] and "nvidia-smi topo -p2p w" in line["text"], line
    assert lines[-1]["kind"] == "", lines[-1]
