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
    for device in (0, 2, 3, 4, 5):
        verdict, detail = verdicts[f"rail verbs:rxe{device}"]
        assert verdict == "ok", detail
        assert "a first write with an immediate arrived" in detail
    assert "rail verbs:rxe1" not in verdicts
    assert verdicts["RDMA ports"] == ("warn", "5 of 6 active; down: rxe1:1")


def test_topo_lists_the_devices() -> None:
    done = _asyncfabric("topo", "--json")
    assert done.returncode == 0, done.stderr
    assert {nic["name"] for nic in json.loads(done.stdout)["nics"]} >= {f"rxe{number}" for number in range(6)}
