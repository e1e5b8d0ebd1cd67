"""Settings of Ray for programs of this folder whose raylets others use: on loopback, patient, and quick to see a death.

Programs call `set_up` before they import Ray.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

TRIES = 4
RAYLET = {"num_cpus": 4, "object_store_memory": 80 << 20}


def set_up() -> str:
    """Set variables of this process, and of the raylets that it starts; return a new folder for what Ray leaves."""
    folder = tempfile.mkdtemp(prefix="af-ray-")
    os.environ.update(
        RAY_TMPDIR=folder,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_prestart_worker_first_driver="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything binds to the loopback interface
        RAY_worker_niceness="0",  # it is 15 otherwise, and nodes inherit it
        RAY_worker_register_timeout_seconds="300",  # a machine with much else to do starts processes slowly
        # A raylet is gone after so many questions that fail. Where nobody listens they fail at once, each a period
        # after the one before; a slow raylet has 10 s for each. So the period is short, and the threshold high.
        RAY_health_check_period_ms="300",
        RAY_health_check_failure_threshold="30",
    )
    return folder


def started(raylets: Any, **more: Any) -> Any:
    """Add a raylet to a Cluster of Ray; one that Ray gave up after 30 s, since the machine was slow, is tried again."""
    for left in reversed(range(TRIES)):
        try:
            return raylets.add_node(**{**RAYLET, **more})
        except Exception:
            if not left:
                raise
    return None


def detached_actors() -> list[dict[str, Any]]:
    """Return name, process and raylet of each detached actor that lives; this process has joined the Ray cluster."""
    from ray._private.state import actors

    return [
        {"name": one["Name"], "pid": one["Pid"], "node": one["Address"]["NodeID"]}
        for one in actors().values()
        if one["State"] == "ALIVE" and one["IsDetached"]
    ]


def what_is_left() -> dict[str, Any]:
    """Return what is left of all clusters: actors and what is reserved."""
    import ray

    groups = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
    return {"actors": sorted(one["name"] for one in detached_actors()), "groups": groups}
