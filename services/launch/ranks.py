"""Nodes of a cluster as ranks of a job: the scheduler starts `asyncfabric up` for each, and restarts it.

What Slurm and torchrun have in common: which node a rank is, becoming it, and a launcher that can only look. Blocking,
before any event loop.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.cluster import registered
from asyncfabric_services.launch.launcher import LaunchedNode, LaunchRefused
from asyncfabric_services.launch.plan import NodePlan, plan_nodes
from asyncfabric_services.launch.record import ClusterRecord, load_record
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.settings.keys import SettingsError, nearest

PATIENCE_SECONDS = 5.0
LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # of TEST-NET-1: the way there is the way to others; nothing is sent
PROGRAM = "from asyncfabric_services.cli import main; main()"


def scheduler_around(variables: Mapping[str, str] = os.environ) -> str:
    """Return the launcher whose variables this process has: slurm or torchrun; otherwise local."""
    if "SLURM_STEP_ID" in variables:  # SLURM_PROCID is there in a batch script too
        return "slurm"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "local"


def node_of(spec: ClusterSpec, name: str, rank: int, ranks: int) -> NodePlan:
    """Return the node of this name, or that of a rank when it is empty; SettingsError when there is none."""
    plans = {plan.name: plan for plan in plan_nodes(spec)}
    if name:
        if name not in plans:
            raise SettingsError(f"{spec.name} has no node {name!r}{nearest(name, list(plans))}")
        return plans[name]
    if ranks != len(plans):
        raise SettingsError(f"{spec.name} has {len(plans)} nodes, and {ranks} ranks were started: one for each node")
    return list(plans.values())[rank]


def become(plan: NodePlan) -> NoReturn:
    """Go on as `asyncfabric serve` with the plan's environment: the same process, so the scheduler sees its end."""
    sys.stdout.flush()
    environment = {**os.environ, **plan.environment}
    os.execve(sys.executable, [sys.executable, "-P", "-c", PROGRAM, *plan.arguments], environment)


def own_address(towards: str = ELSEWHERE) -> str:
    """Return this host's address on the way to another; that of its name where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


class JobLauncher:
    """A cluster whose nodes are a scheduler's: it can be looked at; the rest is the scheduler's own command."""

    def __init__(self, record: ClusterRecord, folder: Path) -> None:
        self.facts = record.facts
        self._record = record
        self._folder = folder

    async def start(self, plan: NodePlan) -> LaunchedNode:
        """Refuse: the scheduler starts nodes.

        Cancellation: nothing was begun.
        """
        raise self._refusal(f"cannot start {plan.name}")

    async def stop(self, name: str) -> None:
        """Refuse: the scheduler ends nodes.

        Cancellation: nothing was begun.
        """
        raise self._refusal(f"cannot stop {name}")

    async def aclose(self) -> None:
        """Refuse: the scheduler ends the job.

        Cancellation: nothing was begun.
        """
        raise self._refusal("cannot end the cluster")

    async def nodes(self) -> list[LaunchedNode]:
        """Return the nodes that the directories know; those that they miss count as ended.

        Cancellation: nothing is left over.
        """
        there = {row["name"]: row for row in await self.rows()}
        found = []
        for plan in plan_nodes(self._record.spec):
            row = there.get(plan.name)
            node = LaunchedNode(plan.name, plan.group, plan.role, "ended", reason="no directory knows it")
            if row is not None:
                node = msgspec.structs.replace(node, state="running", http=row["http"], link=row["link"], reason="")
            found.append(node)
        return found

    async def rows(self) -> list[dict[str, Any]]:
        """Return what the directories know, at the addresses of their present lives; nothing when none answers.

        Cancellation: nothing is left over.
        """
        self._record = load_record(self._folder)
        return await registered(self._record.directories, PATIENCE_SECONDS)

    def _refusal(self, what: str) -> LaunchRefused:
        record = self._record
        how = record.facts.get("how", f"use {record.launcher}'s own commands")
        return LaunchRefused(f"{record.launcher} {what}: the nodes of {record.spec.name} are its own; {how}")


@asynccontextmanager
async def attach_launcher(record: ClusterRecord, folder: Path) -> AsyncIterator[JobLauncher]:
    """Look at the cluster of a job; raises EnvironmentUnfit when no directory of it answers.

    Cancellation: nothing is held.
    """
    launcher = JobLauncher(record, folder)
    if not await launcher.rows():
        places = ", ".join(node.http for node in record.directories)
        raise EnvironmentUnfit(f"no directory of {record.spec.name} answers at {places}; see the logs of the job")
    yield launcher
