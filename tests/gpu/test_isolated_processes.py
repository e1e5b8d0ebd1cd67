"""Processes that see one GPU each, as workers of inference engines do: the driver knows no peer here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LENGTH = (64 << 20) + 12345


def _process(role: str, gpu: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "programs" / "isolated.py"), role, str(LENGTH)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _send(process: subprocess.Popen[str], words: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


def _receive(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait(60)}"
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_gpu_that_the_writer_does_not_see(far: int) -> None:
    with _process("hold", far) as holder, _process("write", 0) as writer:
        try:
            keys = _receive(holder)
            assert keys["gpus"] == 1
            _send(writer, keys)
            assert _receive(writer) == {"gpus": 1, "written": True}
            _send(holder, {})
            assert _receive(holder) == {"right": [True, True]}
            _send(holder, {})
            assert holder.wait(60) == 0 and writer.wait(60) == 0
        finally:
            holder.kill()
            writer.kill()
