"""Makes programs of this folder and of its neighbours importable, and gives each test a short folder: paths of sockets
are bounded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "integration")]  # etcd, and the list of processes


@pytest.fixture
def short() -> Iterator[Path]:
    with TemporaryDirectory(prefix="launch-", dir="/tmp") as folder:
        yield Path(folder)
