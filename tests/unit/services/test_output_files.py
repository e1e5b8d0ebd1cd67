"""Commands that write a file ask whether they can before they measure or record anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric.control.ipc_folder import check_length, default_folder, socket_path
from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.launch.local import short_folder

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
def test_a_missing_folder_is_reported_before_anything_is_done(command: tuple[str, ...], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("command", [("topo",), ("config", "show")], ids=" ".join)
def test_a_disk_that_is_full_is_reported_in_a_line(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-P", "-m", "asyncfabric_services", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert run.returncode == 3 and "No space left on device" in run.stderr, run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("verb", [("new",), ("show",), ("trust", "a" * 64)], ids=" ".join)
def test_a_user_without_home_is_asked_for_the_key_file(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users who are in no list of users."""
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    run = CliRunner().invoke(asyncfabric, ["keys", *verb])
    assert run.exit_code == 2 and "name the file" in run.output, run.output


@pytest.mark.parametrize("folder", ["/tmp", "/tmp/" + "x" * 150], ids=["short", "long"])
def test_nodes_of_a_demo_have_room_for_their_sockets(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", folder)
    base = short_folder() or folder
    check_length(socket_path(Path(base) / "asyncfabric-12345678" / "ipc", "coordinator", 2**63))


def test_a_runtime_folder_of_somebody_else_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root after `sudo -E` would leave a folder there which its owner then cannot use."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "asyncfabric"
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    assert default_folder() == Path("/tmp/asyncfabric-4000000")
