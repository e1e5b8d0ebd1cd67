"""The programs of docs/guide/rollouts.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="THE GUIDE WAS NOT RUN: torch is not installed")
pytest.importorskip("transformers", reason="THE GUIDE WAS NOT RUN: transformers is not installed")

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "rollouts.md"


@pytest.mark.slow
def test_a_training_of_ones_own_runs(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Every part by itself\n")[2]
    block = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    program = tmp_path / "own.py"
    program.write_text(block[1])
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reports = [line for line in done.stdout.splitlines() if line.startswith("UpdateReport(")]
    norms = [line.split() for line in done.stdout.splitlines() if not line.startswith("UpdateReport(")]
    assert len(reports) == 3
    assert [version for version, _ in norms] == ["1", "2", "3"], done.stdout
    assert len({norm for _, norm in norms}) == 3, "each version has other weights"


@pytest.mark.slow
def test_the_three_calls_run(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Three calls\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    programs = [tmp_path / name for name in ("trainer.py", "engine.py")]
    for program, block in zip(programs, blocks, strict=True):
        program.write_text(block)
    with subprocess.Popen([sys.executable, str(programs[0])], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            port = trainer.stdout.readline().strip()
            engine = subprocess.run(
                [sys.executable, str(programs[1]), port], capture_output=True, text=True, timeout=120, check=False
            )
            assert engine.returncode == 0, engine.stderr
            printed, _ = trainer.communicate(timeout=60)
        finally:
            trainer.kill()
    assert trainer.returncode == 0
    assert [line.split(":")[0] for line in printed.splitlines()] == ["version 1", "version 2", "version 3"]
    versions = [line.split()[2] for line in engine.stdout.splitlines()]
    assert versions[-1] == "3" and versions == sorted(set(versions)), engine.stdout
