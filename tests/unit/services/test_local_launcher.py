"""The local launcher: what is left of a node whose start was cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from asyncfabric_services.launch.local import RestartLimit, open_processes
from asyncfabric_services.launch.plan import NodePlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100), pytest.mark.trio]


async def test_a_node_whose_start_is_cancelled_ends_with_its_launcher(tmp_path: Path) -> None:
    """As by Ctrl-C while a cluster comes up: somebody has to see the end of the process that was begun."""
    async with open_processes(tmp_path, tmp_path, RestartLimit(), {}) as launcher:
        with trio.CancelScope() as scope:
            scope.cancel()
            await launcher.start(NodePlan("directory-0", "directory", "directory", {}))
        process = launcher.running["directory-0"].process
        assert process is not None and process.poll() is None, "it began"
    assert process.returncode is not None and launcher.running == {}
