"""Asking a child process: a module run by this Python, arguments in, one JSON object out.

It may crash or hang alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

DEADLINE_S = 60.0  # starting Python takes most of it on an emulated or overcommitted machine


def ask_child(module: str, *arguments: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Return what the child printed last; {"error": ...} when it died, hung or printed something else."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline_s:g} s"}
    return answer_of(done.returncode, done.stdout, done.stderr)


def answer_of(status: int, out: str, err: str) -> dict[str, Any]:
    """Return the JSON object of the last line, or what went wrong."""
    lines = out.strip().splitlines()
    try:
        stated = json.loads(lines[-1]) if lines else None
    except ValueError:
        stated = None
    if isinstance(stated, dict):
        return stated
    if status < 0:
        return {"error": f"its process died by {_signal_name(-status)}"}
    complaint = err.strip().splitlines()
    return {"error": complaint[-1] if complaint else f"no answer, status {status}"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # some real-time signals have no name
        return f"signal {number}"
