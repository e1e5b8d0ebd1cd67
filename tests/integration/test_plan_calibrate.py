"""`plan calibrate` with tiny updates between real processes, and predictions from its file. Errors are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric_services.plan.command import plan

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

TINY = ["weights", "--model", "tiny", "--train", "4", "--infer", "4", "--json"]


@pytest.mark.slow
def test_updates_are_measured_fitted_and_the_file_is_used(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "plan",
        "calibrate",
        "--json",
        "--repeats",
        "1",
        "--no-ops",
        "--out",
        str(file),
        "--fit",
        "1:1:1MiB:copy:256",
        "--fit",
        "1:2:160MiB:copy:256",
        "--fit",
        "4:1:1MiB:cast:256:2",
        "--hold",
        "1:1:2MiB:copy:256",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    reported = json.loads(run.stdout)
    assert reported == json.loads(file.read_text())
    assert [each["fitted"] for each in reported["judged"]] == [True, True, False]
    for each in reported["judged"]:
        assert each["measured_s"] > 0 and each["predicted_s"] > 0 and each["cores"] > 0
    costs = reported["costs"]
    assert all(value >= 0 for value in costs.values()) and reported["op_us"] is None
    begin_ms = [messages * costs["begin_message_ms"] for messages in (2 * 1 + 3 * 1, 2 * 4 + 3 * 4)]
    assert 0 < begin_ms[0] < begin_ms[1] and costs["update_ms"] + costs["end_message_ms"] > 0
    assert costs["fp8_s_per_gb"] == 0 and reported["standard_errors"]["fp8_s_per_gb"] is None

    plain, used = (
        json.loads(CliRunner().invoke(plan, arguments).stdout.splitlines()[-1])
        for arguments in (TINY, [*TINY, "--calibration", str(file)])
    )
    assert plain["calibration"] is None
    assert used["assumptions"]["commit_s"] == reported["wait_s"] and used["calibration"]["costs"] == costs
    assert used["calibration"]["held_out_runs"] == 1
    assert used["predicted_seconds"] > begin_ms[1] / 1000
