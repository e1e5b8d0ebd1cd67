"""Ring 5: real processes. tests/conftest.py looks at what this process leaves, here is what its children leave."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, which leaves siblings out

import processes  # found by the line above
import template


def _shared_memory() -> set[str]:
    """Return the files of /dev/shm that carry the number of a process of this test."""
    pids = {str(pid) for pid in (os.getpid(), *processes.started)}
    return {name for name in os.listdir("/dev/shm") if pids & set(re.split(r"\D+", name))}


@pytest.fixture(scope="session", autouse=True)
def forked_nodes() -> Iterator[None]:
    """Have a process that nodes are forked from; it imports when the first is."""
    template.template = template.Template()
    yield
    template.template.end()
    template.template = None


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    """Fail the test whose processes leave files in /dev/shm."""
    processes.started.clear()
    before = _shared_memory()
    yield
    left = _shared_memory() - before
    assert not left, f"left in /dev/shm: {sorted(left)}"
