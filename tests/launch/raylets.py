"""Two raylets of one Ray cluster on this machine, for launchers to find by RAY_ADDRESS. Blocking.

What they start has a variable with the folder of the cluster that is tried, by which the processes of its nodes are
found.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RAYLET = {"num_cpus": 8, "object_store_memory": 80 << 20}


@contextmanager
def open_raylets(folder: Path) -> Iterator[str]:
    """Run them and yield their address; nothing is left."""
    place = tempfile.mkdtemp(prefix="af-ray-")
    os.environ.update(
        RAY_TMPDIR=place,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_prestart_worker_first_driver="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything binds to the loopback interface
        RAY_worker_niceness="0",  # it is 15 otherwise, and nodes inherit it
        RAY_worker_register_timeout_seconds="300",  # a machine with much else to do starts processes slowly
        RAY_health_check_failure_threshold="30",
        CLUSTER_FOLDER=str(folder.resolve()),
    )
    from ray.cluster_utils import Cluster

    raylets = Cluster(initialize_head=True, head_node_args={**RAYLET, "include_dashboard": False})
    try:
        raylets.add_node(**RAYLET)
        yield raylets.address
    finally:
        raylets.shutdown()
        shutil.rmtree(place, ignore_errors=True)
