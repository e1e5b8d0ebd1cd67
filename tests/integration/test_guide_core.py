"""The two processes of docs/guide/core.md run as they stand, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "core.md"


def test_the_two_processes_of_the_page_run(tmp_path: Path) -> None:
    text = PAGE.read_text()
    block = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```\n\$ (.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None and shown is not None
    program = tmp_path / "core.py"
    program.write_text(block[1])
    command = [sys.executable, "-P", str(program)]
    with subprocess.Popen([*command, "target"], stdout=subprocess.PIPE, text=True) as target:
        try:
            assert target.stdout is not None
            address_and_key = target.stdout.readline().split()
            source = subprocess.run(
                [*command, "source", *address_and_key], capture_output=True, text=True, timeout=60, check=False
            )
            assert source.returncode == 0, source.stderr
            printed, _ = target.communicate(timeout=60)
        finally:
            target.kill()
    assert target.returncode == 0
    lines = [*printed.splitlines(), *source.stdout.splitlines()]
    assert len(lines) == 3
    assert [line for line in lines if line not in shown[1]] == []
