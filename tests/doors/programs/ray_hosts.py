"""Two raylets of one Ray cluster, which others use; actors and a raylet are killed for each line of JSON that asks it.

    {"do": "kill_actor", "node": "decode-0"} -> {"ok": true, "pid": ...}

Ends with its input, and leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = tempfile.mkdtemp(prefix="af-ray-")
os.environ.update(
    RAY_TMPDIR=FOLDER,
    RAY_USAGE_STATS_ENABLED="0",
    RAY_prestart_worker_first_driver="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything binds to the loopback interface
    RAY_worker_niceness="0",  # it is 15 otherwise, and nodes inherit it
    RAY_worker_register_timeout_seconds="300",  # a machine with much else to do starts processes slowly
    RAY_health_check_failure_threshold="30",
)

sys.path.append(str(Path(__file__).parent))

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from scenario_lines import serve  # noqa: E402

TRIES = 4
RAYLET = {"num_cpus": 4, "object_store_memory": 80 << 20}


def started(raylets: Cluster, **more: Any) -> Any:
    """Add a raylet; one that Ray gave up, since the machine was slow, is tried again."""
    for left in reversed(range(TRIES)):
        try:
            return raylets.add_node(**RAYLET, **more)
        except Exception:
            if not left:
                raise
    return None


class Hosts:
    """The raylets, and what happens to them."""

    def __init__(self, raylets: Cluster) -> None:
        self._raylets = raylets
        self._second = started(raylets)

    def address(self) -> dict[str, Any]:
        return {"address": self._raylets.address}

    def kill_actor(self, node: str) -> dict[str, Any]:
        """Kill the process of an actor, and wait until it is gone."""
        pid = self._actors()[node]
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        return {"pid": pid}

    def kill_raylet(self) -> dict[str, Any]:
        """Kill the second raylet; return whose actors it had."""
        lost = self._second.node_id
        names = [one["name"] for one in self._table() if one["node"] == lost]
        self._raylets.remove_node(self._second, allow_graceful=False)
        return {"names": names}

    def add_raylet(self) -> dict[str, Any]:
        self._second = started(self._raylets)
        return {}

    def left(self) -> dict[str, Any]:
        """Return what is left of all clusters: actors and what is reserved."""
        groups = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
        return {"actors": sorted(self._actors()), "groups": groups}

    def _actors(self) -> dict[str, int]:
        return {one["name"]: one["pid"] for one in self._table()}

    def _table(self) -> list[dict[str, Any]]:
        from ray._private.state import actors

        return [
            {"name": one["Name"], "pid": one["Pid"], "node": one["Address"]["NodeID"]}
            for one in actors().values()
            if one["State"] == "ALIVE" and one["IsDetached"]
        ]


@contextmanager
def cluster() -> Iterator[Hosts]:
    raylets = Cluster()
    try:
        started(raylets, include_dashboard=False)
        ray.init(address=raylets.address, log_to_driver=False)
        yield Hosts(raylets)
    finally:
        ray.shutdown()
        raylets.shutdown()
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    serve(cluster(), FOLDER)
