"""Makes the programs of this folder importable, and gives each test a short folder: paths of sockets are bounded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def short() -> Iterator[Path]:
    with TemporaryDirectory(prefix="launch-", dir="/tmp") as folder:
        yield Path(folder)
