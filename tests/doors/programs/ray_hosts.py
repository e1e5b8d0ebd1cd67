"""Two raylets of one Ray cluster, which others use; actors and a raylet are killed for each line of JSON that asks it.

    {"do": "kill_actor", "node": "decode-0"} -> {"ok": true, "pid": ...}

`ray_hosts.py [PORT]`: with a port the first one has the dashboard, which takes jobs there and needs `ray[default]`.
Ends with its input, and leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from ray_settings import detached_actors, set_up, started, what_is_left

FOLDER = set_up()

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from scenario_lines import serve  # noqa: E402


class Hosts:
    """The raylets, and what happens to them."""

    def __init__(self, raylets: Cluster) -> None:
        self._raylets = raylets
        self._second = started(raylets)

    def address(self) -> dict[str, Any]:
        return {"address": self._raylets.address}

    def kill_actor(self, node: str) -> dict[str, Any]:
        """Kill the process of an actor, and wait until it is gone."""
        (pid,) = (one["pid"] for one in detached_actors() if one["name"] == node)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        return {"pid": pid}

    def kill_raylet(self) -> dict[str, Any]:
        """Kill the second raylet; return whose actors it had."""
        lost = self._second.node_id
        names = [one["name"] for one in detached_actors() if one["node"] == lost]
        self._raylets.remove_node(self._second, allow_graceful=False)
        return {"names": names}

    def add_raylet(self) -> dict[str, Any]:
        self._second = started(self._raylets)
        return {}

    def left(self) -> dict[str, Any]:
        """Return what is left of all clusters."""
        return what_is_left()


@contextmanager
def cluster() -> Iterator[Hosts]:
    raylets = Cluster()
    try:
        port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        dashboard = {"dashboard_host": "127.0.0.1", "dashboard_port": port} if port else {}
        started(raylets, include_dashboard=bool(port), **dashboard)
        ray.init(address=raylets.address, log_to_driver=False)
        yield Hosts(raylets)
    finally:
        ray.shutdown()
        raylets.shutdown()
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    serve(cluster(), FOLDER)
