"""Under Slurm: a task of `srun` becomes one node. Nodes meet by files in a folder that the hosts of the job share.

The directory's task writes the record with its address there before it listens, and the key file that all share; after
a restart it comes back at that address. Blocking, before any event loop.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from asyncfabric.control import read_keys
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.launcher import LaunchedNode
from asyncfabric_services.launch.local import free_port
from asyncfabric_services.launch.plan import DIRECTORY_VARIABLE, NodePlan
from asyncfabric_services.launch.ranks import ELSEWHERE, LOOPBACK, attach_launcher, node_of, own_address
from asyncfabric_services.launch.record import KEYS, ClusterRecord, load_record, make_folder, save_record
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.settings.keys import all_keys

__all__ = ["attach_launcher", "own_node"]

LOOK_SECONDS = 0.2
JOB = "job"


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
    """Return the node that this task is, with all that it needs to join; waits for the directory's task.

    Raises SettingsError when there is no such node.
    """
    plan = node_of(spec, name, int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]))
    folder = (folder or Path(os.environ["SLURM_SUBMIT_DIR"]) / f"{spec.name}-{_number()}").absolute()
    section = spec.launcher_section("slurm", SlurmSection)
    alone = os.environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURM_HET_SIZE" not in os.environ
    host = LOOPBACK if alone else own_address(section.network or ELSEWHERE)
    if plan.role == "directory":
        return _directory(spec, plan, folder, host)
    record = _record_of_job(folder)
    variables = {DIRECTORY_VARIABLE: record.directory.link, **_reached_at(host, folder)}
    if plan.role == "trainer":
        variables |= _meeting(folder / f"{plan.group}.{_job()}", host, first=plan.environment["RANK"] == "0")
    return plan.given(variables)


def _directory(spec: ClusterSpec, plan: NodePlan, folder: Path, host: str) -> NodePlan:
    """Return the directory's node at the address that the record has, or at a new one, which the record has then."""
    public = read_keys(make_folder(folder)).public
    http_port, http_host = (all_keys()[key].variable for key in ("http.port", "http.host"))
    try:
        known = load_record(folder)
        kept = known.facts.get(JOB) == _job() and known.directory.link.startswith(f"tcp://{host}:")
    except EnvironmentUnfit:
        kept = False
    if not kept:
        shown = plan.environment.get(http_host, LOOPBACK)
        http = f"http://{host if shown in ('0.0.0.0', '::') else shown}:{free_port(host)}"
        link = f"tcp://{host}:{free_port(host)}#curve={public}"
        directory = LaunchedNode(plan.name, plan.group, plan.role, "running", http, link)
        how = f"scancel {_number()} ends it, sbatch with another count starts it anew"
        known = ClusterRecord("slurm", spec, directory, {JOB: _job(), "how": how})
        save_record(folder, known)
    place = known.directory.link.partition("#")[0]
    variables = {all_keys()["cluster.bind"].variable: place, http_port: known.directory.http.rpartition(":")[2]}
    return plan.given(_reached_at(host, folder) | variables)


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
    """Wait for the record that the directory's task of this run of the job writes."""
    while True:
        try:
            record = load_record(folder)
        except EnvironmentUnfit:
            record = None
        if record is not None and record.facts.get(JOB) == _job():
            return record
        time.sleep(LOOK_SECONDS)


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
