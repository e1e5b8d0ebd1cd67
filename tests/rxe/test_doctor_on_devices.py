"""`asyncfabric doctor` and `topo` where there are RDMA devices: they see and use them, and name what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import links
from extent import ALL


def _asyncfabric(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "asyncfabric_services", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_verbs_is_usable_and_the_device_that_is_down_is_named() -> None:
    down = (1,) if ALL else (1, 2, 4, 5)  # each that is up is tried by a process of its own
    for device in down:
        links.down(device)
    done = _asyncfabric("doctor", "--provider", "verbs", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    verdicts = {row["check"]: (row["verdict"], row["detail"]) for row in rows}
    for device in set(range(6)) - set(down):
        verdict, detail = verdicts[f"rail verbs:rxe{device}"]
        assert verdict == "ok", detail
        assert "a first write with an immediate arrived" in detail
    assert not {f"rail verbs:rxe{device}" for device in down} & set(verdicts)
    listed = ", ".join(f"rxe{device}:1" for device in down)
    assert verdicts["RDMA ports"] == ("warn", f"{6 - len(down)} of 6 active; down: {listed}")


def test_topo_lists_the_devices() -> None:
    done = _asyncfabric("topo", "--json")
    assert done.returncode == 0, done.stderr
    assert {nic["name"] for nic in json.loads(done.stdout)["nics"]} >= {f"rxe{number}" for number in range(6)}
