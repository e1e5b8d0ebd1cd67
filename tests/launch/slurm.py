"""Slurm for tests: Debian's munged, slurmctld and slurmd on this machine, with ports, keys and folders of their own.

All cores are pretended, so that a small machine runs as many steps as a test wants. Blocking.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from asyncfabric_services.launch.local import free_port

CORES = 64
PATIENCE = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
KillWait=30
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs={cores} RealMemory=1000000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return what this machine lacks for it, empty for nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (`make launchers`)"
    return "" if os.geteuid() == 0 else "slurmd wants to be root"


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextmanager
def open_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm with two nodes, both this machine; gives the environment of its commands. All jobs end with it."""
    for name in ("state", "munge", "spool-node1", "spool-node2"):
        (folder / name).mkdir(parents=True, mode=0o755)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (folder / "munge" / "key").chmod(0o400)
    first, controller = _two_ports(), free_port()
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(
        folder=folder, host=host, controller=controller, first=first, second=first + 1, cores=CORES
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
    munged = ["munged", "-F", "--force", *(f"--{name}={folder}/munge/{name.partition('-')[0]}" for name in files)]
    with ExitStack() as stack:
        stack.enter_context(_daemon(munged, environment, folder))
        _until((folder / "munge" / "socket").exists, "munged has no socket", folder)
        stack.enter_context(_daemon(["slurmctld", "-D", "-c"], environment, folder))
        for node in ("node1", "node2"):
            stack.enter_context(_daemon(["slurmd", "-D", "-N", node], environment, folder))
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        _until(lambda: _output(idle, environment) == "2", "the nodes of Slurm are not idle", folder)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False, timeout=PATIENCE)
            with suppress(AssertionError):
                _until(lambda: not _output(["squeue", "-h"], environment), "", folder)


@contextmanager
def _daemon(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{command[0]}.out").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
    return done.stdout.strip()


def _until(condition: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        logs = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in folder.glob("*.log")]
        assert time.monotonic() < deadline, "\n".join([what, *logs])
        time.sleep(0.1)


def _two_ports() -> int:
    """Return a free port whose next one is free too."""
    while True:
        first = free_port()
        with socket.socket() as second, suppress(OSError):
            second.bind(("127.0.0.1", first + 1))
            return first
