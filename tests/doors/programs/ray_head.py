"""A Ray of one host as people start it, `ray start --head`, with the dashboard that jobs are submitted to.

    {"do": "address"} -> {"ok": true, "address": "http://127.0.0.1:..."}

Ends with its input, and leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from ray_settings import RAYLET, TRIES, set_up, what_is_left

PATIENCE_S = 500
FOLDER = set_up()
os.environ.update(
    RAY_DASHBOARD_STARTUP_TIMEOUT_S=str(PATIENCE_S),
    RAY_agent_register_timeout_ms=str(PATIENCE_S * 1000),
    RAY_JOB_STOP_WAIT_TIME_S=str(PATIENCE_S),  # 3 otherwise: too little for a drain
)

import ray  # noqa: E402
from scenario_lines import serve  # noqa: E402

from asyncfabric_services.launch.local import free_port  # noqa: E402


class RayHead:
    """The head: where it is reached, and what is on it."""

    def __init__(self, address: str, dashboard: str) -> None:
        self._address = address
        self._dashboard = dashboard

    def address(self) -> dict[str, Any]:
        """Return the address of the dashboard."""
        return {"address": self._dashboard}

    def left(self) -> dict[str, Any]:
        """Return what is left of all clusters."""
        ray.init(address=self._address, log_to_driver=False)
        try:
            return what_is_left()
        finally:
            ray.shutdown()


@contextmanager
def head() -> Iterator[RayHead]:
    process = None
    try:
        for _ in range(TRIES):  # Ray gives a raylet up that took 30 s to start
            port, dashboard = free_port(), f"http://127.0.0.1:{free_port()}"
            process = _start(port, dashboard)
            if _answers(process, dashboard):
                break
        else:
            raise RuntimeError(f"the dashboard of Ray does not answer; `ray start` ended with {process.poll()}")
        yield RayHead(f"127.0.0.1:{port}", dashboard)
    finally:
        if process is not None:
            process.terminate()
            process.wait()
        shutil.rmtree(FOLDER, ignore_errors=True)


def _start(port: int, dashboard: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    command += [f"--dashboard-port={dashboard.rpartition(':')[2]}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in RAYLET.items()]
    return subprocess.Popen(command)


def _answers(process: subprocess.Popen[bytes], dashboard: str) -> bool:
    """Wait until the dashboard answers; return whether it did before the head ended."""
    while process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{dashboard}/api/jobs/", timeout=10) as answer:
            json.load(answer)
            return True
        time.sleep(0.3)
    return False


if __name__ == "__main__":
    serve(head(), FOLDER)
