"""Under Slurm: a task of `srun` becomes one node. Nodes meet by files in a folder that the hosts of the job share.

Each directory's task leaves its address there before it listens; the first one makes the key file that all share, and
the record, with all addresses. After a restart they come back there. Blocking, before any event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncfabric.control import read_keys
from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.launcher import LaunchedNode
from asyncfabric_services.launch.local import free_port
from asyncfabric_services.launch.plan import DIRECTORY, NodePlan, plan_nodes
from asyncfabric_services.launch.ranks import ELSEWHERE, LOOPBACK, attach_launcher, node_of, own_address
from asyncfabric_services.launch.record import KEYS, ClusterRecord, load_record, make_folder, save_record, write_whole
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.settings.keys import all_keys

__all__ = ["attach_launcher", "own_node"]

LOOK_SECONDS = 0.2
_T = TypeVar("_T")
JOB = "job"


class DirectoryPlace(msgspec.Struct, frozen=True):
    """Where a directory is in one run of a job; a file of its name in the folder has it."""

    job: str
    node: LaunchedNode


class SlurmSection(msgspec.Struct, frozen=True):
    """`[launcher.slurm]`.

    Attributes:
        network: an address of the network that nodes use, such as that of InfiniBand; empty: the default route's.
        options: further lines of `#SBATCH`, such as "--partition=gpu".
        setup: lines of the script that is printed, before nodes start, such as "source venv/bin/activate".
    """

    network: str = ""
    options: list[str] = []
    setup: list[str] = []


def own_node(spec: ClusterSpec, folder: Path | None, name: str) -> NodePlan:
    """Return the node that this task is, with all that it needs to join; waits for the tasks of the directories.

    Raises SettingsError when there is no such node.
    """
    plan = node_of(spec, name, int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]))
    folder = (folder or Path(os.environ["SLURM_SUBMIT_DIR"]) / f"{spec.name}-{_number()}").absolute()
    section = spec.launcher_section("slurm", SlurmSection)
    alone = os.environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURM_HET_SIZE" not in os.environ
    host = LOOPBACK if alone else own_address(section.network or ELSEWHERE)
    if plan.role == DIRECTORY:
        return _directory(spec, plan, folder, host)
    variables = _reached_at(host, folder)
    if plan.role == "trainer":
        variables |= _meeting(folder / f"{plan.group}.{_job()}", host, first=plan.environment["RANK"] == "0")
    return plan.given(variables).joined(_record_of_job(folder).links)


def _directory(spec: ClusterSpec, plan: NodePlan, folder: Path, host: str) -> NodePlan:
    """Return a directory's node at the address that it had in this run of the job, or at a new one.

    The first directory waits for the addresses of the others, and writes the record.
    """
    names = [one.name for one in plan_nodes(spec) if one.role == DIRECTORY]
    first = plan.name == names[0]
    if first:
        make_folder(folder)
    else:
        _until(partial(_place, folder, names[0]))  # left after the key file was made
    public = read_keys(folder / KEYS).public
    node = _place(folder, plan.name)
    if node is None or not node.link.startswith(f"tcp://{host}:"):
        shown = plan.environment.get(all_keys()["http.host"].variable, LOOPBACK)
        http = f"http://{host if shown in ('0.0.0.0', '::') else shown}:{free_port(host)}"
        link = f"tcp://{host}:{free_port(host)}#curve={public}"
        node = LaunchedNode(plan.name, plan.group, plan.role, "running", http, link)
        write_whole(folder / f"{plan.name}.place", msgspec.json.encode(DirectoryPlace(_job(), node)))
    if first:
        how = f"scancel {_number()} ends it, sbatch with another count starts it anew"
        directories = [_until(partial(_place, folder, name)) for name in names]
        save_record(folder, ClusterRecord("slurm", spec, directories, {JOB: _job(), "how": how}))
    bind, http_port = (all_keys()[key].variable for key in ("cluster.bind", "http.port"))
    variables = {bind: node.link.partition("#")[0], http_port: node.http.rpartition(":")[2]}
    return plan.given(_reached_at(host, folder) | variables)


def _place(folder: Path, name: str) -> LaunchedNode | None:
    """Return where a directory is in this run of the job, None before its task has left that."""
    try:
        place = msgspec.json.decode((folder / f"{name}.place").read_bytes(), type=DirectoryPlace)
    except (OSError, *UNREADABLE, msgspec.MsgspecError):
        return None
    return place.node if place.job == _job() else None


def _until(look: Callable[[], _T | None]) -> _T:
    """Return what a look finds, once it finds something."""
    while (found := look()) is None:
        time.sleep(LOOK_SECONDS)
    return found


def _reached_at(host: str, folder: Path) -> dict[str, str]:
    return {
        all_keys()["cluster.bind"].variable: f"tcp://{host}:0",
        all_keys()["cluster.keys"].variable: str(folder / KEYS),
    }


def _job() -> str:
    """Return the number of this run of the job: one that is queued again is another run, on other hosts."""
    return f"{_number()}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def _number() -> str:
    """Return the number that people know the job by: that of the first component of a heterogeneous one."""
    return os.environ.get("SLURM_JOB_ID_HET_GROUP_0") or os.environ["SLURM_JOB_ID"]


def _record_of_job(folder: Path) -> ClusterRecord:
    """Wait for the record that the first directory's task of this run of the job writes."""

    def look() -> ClusterRecord | None:
        with suppress(EnvironmentUnfit):
            record = load_record(folder)
            return record if record.facts.get(JOB) == _job() else None
        return None

    return _until(look)


def _meeting(file: Path, host: str, *, first: bool) -> dict[str, str]:
    """Return where the ranks of a training meet: the first one's choice, in a file, the same after its restart."""
    if first and not file.exists():
        new = file.with_suffix(".new")
        new.write_text(f"{host} {free_port(host)}")
        new.replace(file)
    while not file.exists():
        time.sleep(LOOK_SECONDS)
    address, port = file.read_text().split()
    return {"MASTER_ADDR": address, "MASTER_PORT": port}
