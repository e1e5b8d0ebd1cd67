"""The two processes of docs/guide/channels.md run as they stand, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "channels.md"
pytestmark = pytest.mark.slow


def test_the_two_processes_of_the_page_run(tmp_path: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    program = tmp_path / "channels.py"
    program.write_text(block[1])
    command = [sys.executable, "-P", str(program)]
    with subprocess.Popen([*command, "ping"], stdout=subprocess.PIPE, text=True) as ping:
        try:
            assert ping.stdout is not None
            address = ping.stdout.readline().strip()
            pong = subprocess.run([*command, "pong", address], capture_output=True, text=True, timeout=60, check=False)
            assert pong.returncode == 0, pong.stderr
            printed, _ = ping.communicate(timeout=60)
        finally:
            ping.kill()
    assert ping.returncode == 0
    assert printed == "pong played ball 10\n"
    assert re.fullmatch(r"ping left: .* \(it was on node ping-node\)\n", pong.stdout)
    assert "pong played ball 10\n" in PAGE.read_text()
