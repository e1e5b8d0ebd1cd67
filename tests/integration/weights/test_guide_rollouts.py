"""The training of one's own in docs/guide/rollouts.md runs as it stands."""

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
    section = PAGE.read_text().partition("## Your own training\n")[2]
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
