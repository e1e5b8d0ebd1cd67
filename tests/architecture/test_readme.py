"""The README's promises: each Python block runs as it stands, each command is a verb of the Makefile.

The example needs the compiled engine; without it the test is skipped and reports it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house_tree import ROOT

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCK.findall(README) if language == "python"]
VERBS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_is_an_example_of_about_twenty_lines() -> None:
    assert PYTHON
    assert len(PYTHON[0].strip().splitlines()) <= 24


def test_commands_of_the_readme_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    assert named <= VERBS


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_python_blocks_run(index: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("asyncfabric._native._engine") is None:
        pytest.skip("THE README WAS NOT RUN: the compiled engine is not built (`make build`)")
    program = tmp_path / "example.py"
    program.write_text(PYTHON[index])
    done = subprocess.run([sys.executable, "-W", "error", str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout
