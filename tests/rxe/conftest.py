"""Ring 6 runs where tests/rxe/ring.py put it: in a machine with six soft-RoCE devices. Elsewhere it is skipped.

The tests of the harness itself (test_harness.py) run anywhere. Names of devices and interfaces: see guest/network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]  # pytest imports by path, which leaves siblings out

IN_THE_MACHINE = os.environ.get("ASYNCFABRIC_RXE") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IN_THE_MACHINE:
        return
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name != "test_harness.py":
            item.add_marker(pytest.mark.skip(reason="runs in the soft-RoCE machine: make rxe"))


@pytest.fixture(autouse=True)
def network_is_whole() -> Iterator[None]:
    """Give every test all links up and nothing harmed, whatever the one before did."""
    yield
    if IN_THE_MACHINE:
        import links

        links.restore()
