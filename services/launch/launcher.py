"""What launchers have in common: the protocol that each fulfils, what it reports of a node, and where each is found.

A launcher is a thin translation: the scheduler beneath it places nodes, starts them and restarts those that die. Here
are no processes and no policy.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import click
import msgspec

from asyncfabric_services.exits import USAGE
from asyncfabric_services.launch.plan import NodePlan
from asyncfabric_services.launch.spec import ClusterSpec

if TYPE_CHECKING:
    from asyncfabric_services.launch.record import ClusterRecord

NodeState = Literal["starting", "running", "restarting", "failed", "ended"]


class LaunchRefused(click.ClickException):
    """A launcher cannot do what was asked; the text names the launcher and who can."""

    exit_code = USAGE


class LaunchedNode(msgspec.Struct, frozen=True):
    """One node as its launcher knows it.

    Attributes:
        name, group, role: as in its plan.
        state: of its process; whether the node is ready is the directory's to know.
        http: its HTTP address, empty before it listens.
        link: its link address, empty before it listens.
        restarts: how often its scheduler started it anew.
        reason: why it is restarting or failed, for people.
    """

    name: str
    group: str
    role: str
    state: NodeState
    http: str = ""
    link: str = ""
    restarts: int = 0
    reason: str = ""


class Launcher(Protocol):
    """One running cluster, held by what runs its nodes. Used on trio's event loop, several nodes at once."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What `attach_launcher` needs in another process to find the cluster; kept in its record."""
        ...

    async def start(self, plan: NodePlan) -> LaunchedNode:
        """Start a node and return it when it listens. From now on the scheduler restarts it when it dies.

        A directory comes back at the address that it had: all other nodes were given that.

        Raises:
            BrokenError: it ended instead; the text has the end of its log.
            LaunchRefused: this launcher starts nothing.

        Cancellation: the node is ended with the cluster.
        """
        ...

    async def stop(self, name: str) -> None:
        """Have a node drain and end, for good: it is not restarted. Killed when it takes longer than its drain.

        Raises:
            KeyError: there is no such node.
            LaunchRefused: this launcher stops nothing.

        Cancellation: the node goes on ending.
        """
        ...

    async def nodes(self) -> list[LaunchedNode]:
        """Return the nodes that were started and not stopped.

        Cancellation: nothing is left over.
        """
        ...

    async def aclose(self) -> None:
        """End the cluster: the nodes that are left, and whatever holds them. Idempotent.

        Cancellation: shielded and bounded.
        """
        ...


class LauncherModule(Protocol):
    """A module of LAUNCHERS.

    Attributes:
        OUTLIVES: whether nodes go on when the process that started them ends; otherwise `up --detach` leaves a process.
    """

    OUTLIVES: bool

    def open_launcher(self, spec: ClusterSpec, folder: Path) -> AbstractAsyncContextManager[Launcher]:
        """Open a launcher for a new cluster, whose files (key, logs) go to the folder.

        Leaving the scope ends no node that outlives the process: `aclose` does.
        """
        ...

    def attach_launcher(self, record: ClusterRecord, folder: Path) -> AbstractAsyncContextManager[Launcher]:
        """Open the launcher of a running cluster from another process. Raises EnvironmentUnfit when it is gone."""
        ...


LAUNCHERS = {
    "local": "asyncfabric_services.launch.local",
    "ray": "asyncfabric_services.launch.ray.launcher",
}
"""Launcher by name -> its module, imported when it is asked for."""
RANKS = {
    "slurm": "asyncfabric_services.launch.slurm",
    "torchrun": "asyncfabric_services.launch.torchrun",
}
"""Schedulers that start `asyncfabric up` once for each node, which becomes it -> the module that knows which."""
PRINTERS = {
    "slurm": ("asyncfabric_services.launch.slurm_script", "script_of"),
    "kubernetes": ("asyncfabric_services.launch.kubernetes.objects", "cluster_text"),
    "helm": ("asyncfabric_services.launch.kubernetes.chart", "chart_files"),
}
"""What `up --print` can print -> (module, function of a ClusterSpec and the path of its file that returns text, or the
text of several files by their path)."""


def launcher_module(name: str) -> LauncherModule:
    """Return the module of a launcher, or of ranks, which has no `open_launcher`; LaunchRefused when there is none."""
    modules = LAUNCHERS | RANKS
    if name not in modules:
        raise LaunchRefused(f"{name!r} is no launcher: one of {', '.join(modules)}")
    return cast("LauncherModule", importlib.import_module(modules[name]))
