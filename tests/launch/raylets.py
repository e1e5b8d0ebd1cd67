"""Two raylets of one Ray cluster on this machine, for launchers to find by RAY_ADDRESS. Blocking.

What they start has a variable with the folder of the cluster that is tried, by which the processes of its nodes are
found.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "doors" / "programs"))
CPUS = 8


@contextmanager
def open_raylets(folder: Path) -> Iterator[str]:
    """Run them and yield their address; nothing is left."""
    from ray_settings import set_up, started

    place = set_up()
    os.environ["CLUSTER_FOLDER"] = str(folder.resolve())
    from ray.cluster_utils import Cluster

    raylets = Cluster()
    try:
        started(raylets, num_cpus=CPUS, include_dashboard=False)
        started(raylets, num_cpus=CPUS)
        yield raylets.address
    finally:
        raylets.shutdown()
        shutil.rmtree(place, ignore_errors=True)
