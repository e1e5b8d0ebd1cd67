"""Predictions with a calibration file: what it changes, how that is stated, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from asyncfabric.sim import Calibration, HostCosts, Judged
from asyncfabric.sim.costs import COSTS
from asyncfabric_services.plan.command import plan

TINY = ["weights", "--model", "tiny", "--train", "4", "--infer", "4"]
MOE = ["moe", "--ranks", "16", "--tokens", "16", "--hidden", "256", "--experts", "32", "--routings", "1"]

FREE = dict.fromkeys(COSTS, 0.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, list(arguments), standalone_mode=True)


def seconds(*arguments: str) -> float:
    result = run(*TINY, "--json", "--assume", "skew_s=0", *arguments)
    assert result.exit_code == 0, result.output
    return float(json.loads(result.stdout.splitlines()[-1])["predicted_seconds"])


def file_of(folder: Path, wait_s: float = 0.25, **costs: float) -> Path:
    judged = (Judged("a", 2.0, 1.0, 1.5, True), Judged("b", 2.0, 1.0, 1.1, False), Judged("c", 2.0, 1.0, 0.7, False))
    found = Calibration(
        costs=HostCosts(**(FREE | costs)),
        standard_errors=dict.fromkeys(COSTS),
        wait_s=wait_s,
        op_us=0.5,
        machine="two cores",
        provider="local",
        judged=judged,
    )
    path = folder / "calibration.json"
    path.write_bytes(msgspec.json.encode(found))
    return path


def test_without_a_file_the_output_reports_it() -> None:
    for command in (TINY, MOE):
        text = run(*command).output
        assert "not calibrated" in text and "measured over" not in text
    assert json.loads(run(*MOE, "--json").stdout)["calibration"] is None


@pytest.mark.parametrize("command", [TINY, MOE])
def test_what_was_measured_is_marked_and_the_error_stands_beside_it(command: list[str], tmp_path: Path) -> None:
    text = run(*command, "--calibration", str(file_of(tmp_path))).output
    (line,) = [line for line in text.splitlines() if line.strip().startswith("message_us")]
    assert line.split() == ["message_us", "0.5", "measured"]
    (line,) = [line for line in text.splitlines() if line.strip().startswith("rail_gbits_per_s")]
    assert "measured" not in line
    assert "2 runs that were not fitted: median 20.0%, worst 30.0%" in text and "two cores" in text
    assert "not calibrated" not in text


def test_what_the_user_states_wins_and_is_not_called_measured(tmp_path: Path) -> None:
    text = run(*TINY, "--calibration", str(file_of(tmp_path)), "--assume", "message_us=0.75").output
    (line,) = [line for line in text.splitlines() if line.strip().startswith("message_us")]
    assert line.split() == ["message_us", "0.75"]


def test_event_loops_cost_time_beside_devices_and_bytes_do_not(tmp_path: Path) -> None:
    free = seconds("--calibration", str(file_of(tmp_path)))
    assert free == pytest.approx(0.25, abs=0.03)
    assert seconds("--calibration", str(file_of(tmp_path, checksum_s_per_gb=500.0, fp8_s_per_gb=500.0))) == free
    assert seconds("--calibration", str(file_of(tmp_path, write_us=1e6))) == free, "posting was measured by itself"
    begins, ends = (
        4 * 2 + 4 * 4,
        4,
    )  # four trainers, four receivers that forward; of the messages besides, those that all wait for
    for name, messages in (("begin_message_ms", begins), ("end_message_ms", ends)):
        wanted = pytest.approx(free + messages * 0.05, abs=0.01)
        assert seconds("--calibration", str(file_of(tmp_path, **{name: 50.0}))) == wanted
    opened = seconds("--calibration", str(file_of(tmp_path, opened_ms=100.0))) - free
    assert opened > 0.2, "a receiver sends each of its senders the key"
    both = seconds("--calibration", str(file_of(tmp_path, opened_ms=100.0, begin_message_ms=50.0)))
    assert both == pytest.approx(free + begins * 0.05 + opened - 4 * 0.05, abs=0.01), (
        "while trainers learn who takes part"
    )
    assert seconds("--calibration", str(file_of(tmp_path, update_ms=100.0))) == pytest.approx(free + 0.1, abs=0.01)
    assert seconds("--calibration", str(file_of(tmp_path, report_ms=50.0))) > free + 0.04


def test_cores_make_bytes_cost_time(tmp_path: Path) -> None:
    file = str(file_of(tmp_path, fp8_s_per_gb=5000.0))
    coarse = ("--calibration", file, "--assume", "step_s=0.2")
    one, half = seconds(*coarse, "--cores", "1"), seconds(*coarse, "--cores", "0.5")
    assert one > seconds("--calibration", file) + 0.5
    assert half - 0.25 == pytest.approx(2 * (one - 0.25), rel=0.1)


def test_what_is_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"costs": 3}')
    for command in (TINY, MOE):
        result = run(*command, "--calibration", str(path))
        assert result.exit_code == 2 and "is no calibration" in result.output
    result = run(*TINY, "--cores", "2")
    assert result.exit_code == 2 and "needs the costs of a --calibration" in result.output


@pytest.mark.parametrize(
    "text",
    ["2:2:1MiB", "2:2:1MiB:zip", "0:1:1MiB:copy", "2:2:much:copy", "3:2:1MiB:copy:256:0", "3:2:1MiB:copy:256:1:1"],
)
def test_shapes_that_are_none_are_refused(text: str) -> None:
    result = run("calibrate", "--fit", text)
    assert result.exit_code == 2 and "is not TRAINERS:RECEIVERS:BYTES" in result.output


def test_the_error_bar_is_that_of_the_runs_that_were_not_fitted(tmp_path: Path) -> None:
    found = json.loads(run(*TINY, "--json", "--calibration", str(file_of(tmp_path))).stdout.splitlines()[-1])
    low, high = found["predicted_range"]
    worst = found["calibration"]["worst_error"]
    assert low == pytest.approx(found["predicted_seconds"] * (1 - worst), abs=1e-3)
    assert high == pytest.approx(found["predicted_seconds"] * (1 + worst), abs=1e-3)
    assert "error bar" in run(*TINY, "--calibration", str(file_of(tmp_path))).output
    assert json.loads(run(*TINY, "--json").stdout.splitlines()[-1])["predicted_range"] is None
