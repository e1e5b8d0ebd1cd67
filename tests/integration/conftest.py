"""Ring 5: real processes. The checks of tests/conftest.py look at this process; here also at what killed children leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, which leaves siblings out

_OURS = ("asyncfabric", "af_", "af-", "fi_")  # ours, and what libfabric's shm provider makes


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(_OURS)}


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    """Fail the test whose processes leave files in /dev/shm."""
    before = _shared_memory()
    yield
    left = _shared_memory() - before
    assert not left, f"left in /dev/shm: {sorted(left)}"
