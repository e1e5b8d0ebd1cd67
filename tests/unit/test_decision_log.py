"""The decision log: what survives a crash, a cut line, a damaged line, a full disk and a second coordinator."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncfabric.errors import BrokenError, BusyError, ClosedError
from asyncfabric.weights.coordinator.decision_log import DecisionLog


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let files of this process grow no further than `size` bytes; Python turns the signal into an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_decisions_outlive_the_process(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log") as log:
        assert (log.begun, log.committed, log.manifest) == (0, 0, "")
        log.begin(3, "three")
        log.commit(3)
        log.begin(4, "four")
    with DecisionLog(tmp_path / "log") as log:
        assert (log.begun, log.committed, log.manifest) == (4, 3, "three")
        log.commit(4)
        assert (log.committed, log.manifest) == (4, "four")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_was_never_a_decision(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with DecisionLog(path) as log:
        log.begin(1, "m")
        whole = path.stat().st_size
        log.commit(1)
    text = path.read_bytes()
    for length in range(whole, len(text)):
        path.write_bytes(text[:length])
        with DecisionLog(path) as log:
            assert (log.begun, log.committed) == (1, 0)
            assert path.stat().st_size == whole
            log.commit(1)
        assert path.read_bytes() == text


def test_a_damaged_line_is_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with DecisionLog(path) as log:
        for version in (1, 2):
            log.begin(version, "m")
            log.commit(version)
    text = path.read_bytes()
    second = text.index(b"\n") + 1
    for damaged in (text.replace(b'"version":1', b'"version":9', 1), text[:second] + b"?" + text[second:]):
        path.write_bytes(damaged)
        with pytest.raises(BrokenError, match=r"damaged in line [12]"):
            DecisionLog(path)
        assert path.read_bytes() == damaged


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log"), pytest.raises(BusyError, match="in use"):
        DecisionLog(tmp_path / "log")
    DecisionLog(tmp_path / "log").close()


def test_a_full_disk_is_reported_and_leaves_no_part_of_a_decision(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with DecisionLog(path) as log:
        log.begin(1, "m")
        log.commit(1)
        log.begin(2, "m")
        size = path.stat().st_size
        for room in (0, 1, 20):
            with disk_of(size + room), pytest.raises(BrokenError, match="commit of version 2") as caught:
                log.commit(2)
            assert caught.value.remedy == "make room on that disk"
            assert path.stat().st_size == size and log.committed == 1
        log.commit(2)
    with DecisionLog(path) as log:
        assert log.committed == 2


def test_a_log_whose_content_is_unsure_takes_no_more(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log") as log:
        log.begin(1, "m")
        spare, log._file = log._file, os.open(tmp_path / "log", os.O_RDONLY)  # a disk that refuses everything
        try:
            with pytest.raises(BrokenError, match="what it holds is not known"):
                log.commit(1)
        finally:
            os.close(log._file)
            log._file = spare
        with pytest.raises(BrokenError, match="not known"):
            log.commit(1)


def test_versions_only_grow_and_only_the_open_one_is_decided(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log") as log:
        with pytest.raises(ValueError, match="not open"):
            log.commit(1)
        log.begin(5, "m")
        for version in (4, 5):
            with pytest.raises(ValueError, match="greater than 5"):
                log.begin(version, "m")
        with pytest.raises(ValueError, match="begun 5"):
            log.commit(4)
        log.commit(5)
        with pytest.raises(ValueError, match="committed 5"):
            log.commit(5)
    with pytest.raises(ClosedError):
        log.begin(6, "m")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match="cannot be opened"):
        DecisionLog(tmp_path / "none" / "log")


def test_without_a_path_it_is_in_memory() -> None:
    with DecisionLog(None) as log:
        log.begin(3, "abc")
        log.commit(3)
        assert (log.begun, log.committed, log.manifest) == (3, 3, "abc")
        with pytest.raises(ValueError, match="version must be greater than 3"):
            log.begin(3, "abc")
    with pytest.raises(ClosedError, match="the decision log in memory is closed"):
        log.begin(4, "abc")
