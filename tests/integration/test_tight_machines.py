"""Where descriptors, threads or shared memory run out, as in containers: an error at the call, which names what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from availability import namespaces_missing, need
from processes import PROGRAMS

ENOUGH = 24


def _tight(*words: object, prefix: tuple[str, ...] = ()) -> Any:
    command = [*prefix, sys.executable, str(PROGRAMS / "tight.py"), *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr}"
    return json.loads(ended.stdout)


def _descriptors(soft: int, hard: int) -> tuple[str, ...]:
    return ("prlimit", f"--nofile={soft}:{hard}")


def _shared_memory(size: str) -> tuple[str, ...]:
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ("unshare", "--mount", "bash", "-c", mount, "bash")


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_a_low_soft_limit_of_descriptors_is_raised(rail: str) -> None:
    need(rail)
    reported = _tight("many", rail, ENOUGH, prefix=_descriptors(96, 8192))
    assert (reported["wrote"], reported["error"]) == (ENOUGH, ""), reported


@pytest.mark.parametrize(
    ("rail", "soft"),
    [
        *(("local", soft) for soft in (32, 64, *range(62, 82, 3), 96, 128)),  # one more fabric takes about 20
        *(("tcp", soft) for soft in (32, 64, 96, 128)),
    ],
)
def test_who_has_no_descriptor_left_is_informed(rail: str, soft: int) -> None:
    """Whichever call meets the end of them: it is no defect of ours, and no transport's."""
    need(rail)
    reported = _tight("many", rail, ENOUGH, prefix=_descriptors(soft, soft))
    assert reported["error"] in {"DeviceError", "PeerError"} and "file descriptor" in reported["text"], reported


@pytest.mark.skipif(
    os.getuid() != 0, reason="the bound counts all that this user runs; root becomes a user who runs nothing"
)
@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_who_may_have_no_more_threads_is_informed(rail: str) -> None:
    need(rail)
    *refused, opened = _tight("threads", rail)
    assert refused and opened["error"] == "", (refused, opened)
    for reported in refused:
        assert reported["error"] == "DeviceError" and "no thread can be started" in reported["text"], reported


@pytest.mark.skipif(bool(namespaces_missing()), reason="no namespaces here")
class TestSharedMemory:
    @pytest.mark.parametrize("rail", ["local", "tcp"])
    def test_other_rails_need_none(self, rail: str) -> None:
        need(rail)
        assert _tight("many", rail, 1, prefix=_shared_memory("64k"))["wrote"] == 1
