"""`asyncfabric doctor` and `topo` where there are RDMA devices: they see and use them, and name what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import links


def _asyncfabric(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "asyncfabric_services", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_verbs_is_usable_and_the_device_that_is_down_is_named() -> None:
    links.down(1)
    done = _asyncfabric("doctor", "--provider", "verbs", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    verdicts = {row["check"]: (row["verdict"], row["detail"]) for row in rows}
    assert verdicts["rail verbs"][0] == "ok", verdicts
    assert "arrived" in verdicts["rail verbs"][1], verdicts
    lines = {f"{check}: {detail}": verdict for check, (verdict, detail) in verdicts.items()}
    for number in range(6):
        assert any(f"rxe{number}" in line for line in lines), (number, lines)
    assert any(verdict != "ok" and "rxe1" in line for line, verdict in lines.items()), lines


def test_topo_lists_the_devices() -> None:
    done = _asyncfabric("topo", "--json")
    assert done.returncode == 0, done.stderr
    assert {nic["name"] for nic in json.loads(done.stdout)["nics"]} >= {f"rxe{number}" for number in range(6)}
