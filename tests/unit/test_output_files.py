"""Commands that write a file ask whether they can before they measure or record anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric_services.cli import asyncfabric

WRITERS = {
    "trace record": ("trace", "record", "--node", "http://127.0.0.1:9", "--output"),
    "trace merge": ("trace", "merge", __file__, "--output"),
    "plan calibrate": ("plan", "calibrate", "--out"),
    "plan weights, picture": ("plan", "weights", "--model", "tiny", "--svg"),
    "plan weights, trace": ("plan", "weights", "--model", "tiny", "--perfetto"),
    "topo": ("topo", "--svg"),
    "bench": ("bench", "write", "--plot"),
}


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_a_folder_that_is_not_there_is_told_before_anything_is_done(command: tuple[str, ...], tmp_path: Path) -> None:
    wanted = tmp_path / "nowhere" / "file.json"
    run = CliRunner().invoke(asyncfabric, [*command, str(wanted)])
    assert run.exit_code == 2, run.output
    assert f"there is no folder {wanted.parent}" in run.output


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    run = CliRunner().invoke(asyncfabric, ["topo", "--svg", str(tmp_path)])
    assert run.exit_code == 2 and f"{tmp_path} is a folder" in run.output


def test_what_is_there_is_written_over(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text("old")
    run = CliRunner().invoke(asyncfabric, ["topo", "--svg", str(picture)])
    assert run.exit_code == 0, run.output
    assert picture.read_text().startswith("<svg")
