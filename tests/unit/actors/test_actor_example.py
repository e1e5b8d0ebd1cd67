"""The example of docs/explain/actors.md runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "explain" / "actors.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    assert len(blocks[0].strip().splitlines()) <= 28
    program = tmp_path / "example.py"
    program.write_text(blocks[0])
    done = subprocess.run([sys.executable, "-W", "error", str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello 42\n"
