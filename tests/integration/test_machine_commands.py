"""`asyncfabric topo` and `asyncfabric doctor` as people run them: on this machine, and topo on trees of others."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from machines import dgx_h100

pytest.importorskip("asyncfabric._native._engine", reason="THE COMMANDS WERE NOT RUN: `make build`")

pytestmark = pytest.mark.slow
SVG = "{http://www.w3.org/2000/svg}"


def asyncfabric(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-P", "-W", "error", "-m", "asyncfabric_services", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_topo_draws_this_machine() -> None:
    done = asyncfabric("topo")
    assert done.returncode == 0, done.stderr
    assert "NUMA node 0" in done.stdout
    assert "who serves whom" in done.stdout


def test_topo_draws_another_machine_as_text_json_and_picture(tmp_path: Path) -> None:
    root = str(dgx_h100(tmp_path / "tree").root)
    text = asyncfabric("topo", "--root", root).stdout
    assert "GPU 4  0000:9d:00.0  10de:2330  <-> mlx5_6" in text
    assert "GPU 4   mlx5_6; same switch; worker on CPU 56" in text
    picture = tmp_path / "dgx.svg"
    done = asyncfabric("topo", "--root", root, "--json", "--svg", str(picture))
    values = json.loads(done.stdout)
    assert values["distances"][4][6] == "same switch"
    assert values["nics"][0]["kind"] == "infiniband"
    drawing = ElementTree.parse(picture).getroot()
    labels = [element.text or "" for element in drawing.iter(f"{SVG}text")]
    assert sum("GPU" in label and "↔ mlx5_" in label for label in labels) == 8


def test_this_machine_can_be_saved(tmp_path: Path) -> None:
    saved = asyncfabric("topo", "--json", "--save", str(tmp_path / "copy"))
    assert json.loads(asyncfabric("topo", "--json", "--root", str(tmp_path / "copy")).stdout) == json.loads(
        saved.stdout
    )


def test_topo_without_a_tree_is_unfit(tmp_path: Path) -> None:
    done = asyncfabric("topo", "--root", str(tmp_path))
    assert done.returncode == 3
    assert "holds no folder sys" in done.stderr


def test_doctor_finds_the_local_rail_usable() -> None:
    done = asyncfabric("doctor", "--provider", "local", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(row) == {"check", "verdict", "detail", "fix"} for row in rows)
    verdicts = {row["check"]: row["verdict"] for row in rows}
    assert done.returncode == 0, rows
    assert verdicts["rail local"] == verdicts["usable"] == "ok"
    assert not {"rail tcp", "RDMA devices", "libfabric"} & set(verdicts), "narrowed to what local needs"


def test_doctor_fails_for_hardware_that_is_not_there() -> None:
    from asyncfabric.observe import read_topology
    from asyncfabric_services.doctor.trials import present

    if "efa" in present(read_topology()):
        pytest.skip("THE ABSENCE OF EFA WAS NOT TESTED: this machine has it")
    done = asyncfabric("doctor", "--provider", "efa")
    assert done.returncode == 3
    assert "fail  RDMA devices        none, and efa needs it" in done.stdout
    assert "fail  rail efa" in done.stdout


def test_doctor_prints_each_check_once_with_its_fix() -> None:
    done = asyncfabric("doctor")
    lines = done.stdout.splitlines()
    checks = [line[6:26].strip() for line in lines if not line.startswith(" ")]
    assert len(checks) == len(set(checks))
    assert {"kernel", "clock source", "ptrace policy", "libfabric", "rail local", "usable"} <= set(checks)
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        assert not line.startswith(("warn", "fail")) or following.strip().startswith("fix: ")
    assert (done.returncode == 3) == any(line.startswith("fail") for line in lines)
