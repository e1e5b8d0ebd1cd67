"""Files of coordinator and trainer: folders are made, and what cannot be written is reported before they listen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="services need starlette")

from asyncfabric_services.fanout.coordinator_service import log_file
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import Settings, WeightsSection
from asyncfabric_services.trainer.checkpoints import fault_of


def found(path: Path | None) -> Path:
    return log_file(Settings(weights=WeightsSection(log=path)))


def test_the_folder_is_made(tmp_path: Path) -> None:
    wanted = tmp_path / "lib" / "asyncfabric" / "decisions"
    assert found(wanted) == wanted
    assert wanted.parent.is_dir() and not wanted.exists()
    assert found(wanted) == wanted, "a folder that is there is taken"


def test_what_cannot_be_written_is_reported(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for path, text in [
        (None, "weights.log is empty"),
        (tmp_path, "is the folder"),
        (taken / "decisions", "cannot be made: (File exists|Not a directory)"),
        (taken / "below" / "decisions", "cannot be made: Not a directory"),
    ]:
        with pytest.raises(StartError, match=text):
            found(path)


def test_a_folder_of_checkpoints_is_made_or_reported(tmp_path: Path) -> None:
    wanted = tmp_path / "lib" / "checkpoints"
    assert fault_of(wanted) == "" and wanted.is_dir()
    taken = tmp_path / "taken"
    taken.write_text("")
    assert fault_of(taken).endswith("taken cannot be made: File exists")
    assert fault_of(taken / "below").endswith("cannot be made: Not a directory")
