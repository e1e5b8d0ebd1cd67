"""Nodes as processes of this machine: started, restarted when they die, drained, killed. Runs on the event loop.

The process that holds the launcher supervises; other shells reach it over an actor (`local_control`). All nodes share a
key file of the launch, so their fabrics have a secret. Directories have sockets of fixed names, so that after a restart
they are where all others look for them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import gettempdir

import msgspec
import trio

from asyncfabric.control.ipc_folder import default_folder, make_private
from asyncfabric.errors import BrokenError
from asyncfabric_services.launch.cluster import stop_all
from asyncfabric_services.launch.launcher import LaunchedNode, LaunchRefused
from asyncfabric_services.launch.local_control import attach_launcher, serve_launcher
from asyncfabric_services.launch.local_node import LocalNode
from asyncfabric_services.launch.plan import DIRECTORY, DIRECTORY_VARIABLE, NodePlan
from asyncfabric_services.launch.record import make_folder
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.quantities import parse_duration
from asyncfabric_services.settings.keys import all_keys

__all__ = ["OUTLIVES", "LocalLauncher", "attach_launcher", "free_port", "open_launcher", "open_processes"]

OUTLIVES = False
END_SECONDS = 10.0  # beyond the drain
BIND = all_keys()["cluster.bind"].variable
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
LONGEST_TMPDIR = 40  # bytes; folder, name of the node, process and a random number follow, 67 at most
_log = logging.getLogger(__name__)


class RestartLimit(msgspec.Struct, frozen=True):
    """`[launcher.local]`: a node that dies more often is left dead, and reported as failed.

    Attributes:
        restarts: so many.
        within: such as "60s".
    """

    restarts: int = 10
    within: str = "60s"


class LocalLauncher:
    """Nodes as local processes; made by `open_launcher`, or by `open_processes` without restarts.

    Attributes:
        running: nodes by name that were started and not stopped.
        ipc_folder: where their sockets are.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        folder: Path,
        ipc_folder: Path,
        limit: RestartLimit,
        settings: Mapping[str, str],
    ) -> None:
        self.running: dict[str, LocalNode] = {}
        self.ipc_folder = str(ipc_folder)
        self.facts: dict[str, str] = {}
        self._nursery = nursery
        self._folder = folder
        self._limit = limit
        self._within_s = parse_duration(limit.within)
        self._ports: dict[str, str] = {}
        self._directories: dict[str, str] = {}
        owned = tuple(all_keys()[key].variable for key in ("cluster.bind", "cluster.directory", "cluster.advertise"))
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in owned},
            "ASYNCFABRIC_HTTP__PORT": "0",
            BIND: f"ipc://{ipc_folder}/",
            "ASYNCFABRIC_CLUSTER__KEYS": str(make_folder(folder)),
            **settings,
        }

    async def start(self, plan: NodePlan) -> LaunchedNode:
        """Start a node and return it when it listens; see Launcher.start.

        Raises:
            BrokenError: it ended instead; the text has the end of its log.
            LaunchRefused: a node of this name runs.

        Cancellation: the node is ended with the launcher.
        """
        if plan.name in self.running:
            raise LaunchRefused(f"{plan.name} runs already")
        variables = {DIRECTORY_VARIABLE: ",".join(self._directories.values())}
        if plan.role == DIRECTORY:
            self._directories[plan.name] = f"ipc://{self.ipc_folder}/{plan.name}.sock"
            variables = {BIND: self._directories[plan.name]}
        if plan.role == "trainer":
            port = self._ports.setdefault(plan.group, str(free_port()))
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        node = LocalNode(plan.given(variables | plan.environment), self._folder / f"{plan.name}.log")
        self.running[plan.name] = node
        try:
            await node.run(self._environment)
        finally:
            if node.process is None or node.process.returncode is not None:
                del self.running[plan.name]
            else:  # also where the start was cancelled, or `aclose` would wait for an end that nobody sees
                self._nursery.start_soon(self._keep, node)
        return node.launched()

    async def stop(self, name: str) -> None:
        """Have a node drain and end for good; see Launcher.stop.

        Cancellation: the node goes on ending.
        """
        await self.end(name)

    async def end(self, name: str) -> int:
        """Have a node drain, and return its exit status; it is killed when it takes far longer than its drain.

        Cancellation: the node goes on ending.
        """
        node = self.running[name]
        node.stopping.set()
        node.signal(signal.SIGTERM)
        with trio.move_on_after(_drain_s(node.plan) + END_SECONDS):
            await node.ended.wait()
        return await self.kill(name)

    async def ended(self, name: str) -> int:
        """Wait for a node that ends by itself and is not restarted; return its exit status.

        Cancellation: only this wait ends.
        """
        await self.running[name].ended.wait()
        return self.running.pop(name).status

    async def kill(self, name: str) -> int:
        """End a node for good without a warning; return the exit status of one that had ended.

        Cancellation: shielded; it is a moment.
        """
        node = self.running[name]
        node.stopping.set()
        node.signal(signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await node.ended.wait()
        self.running.pop(name, None)
        return node.status

    async def nodes(self) -> list[LaunchedNode]:
        """Return the nodes that were started and not stopped.

        Cancellation: nothing is left over.
        """
        return [node.launched() for node in self.running.values()]

    async def aclose(self) -> None:
        """End all nodes, routers first and the directory last; those that take too long are killed. Idempotent.

        Cancellation: shielded and bounded.
        """
        with trio.CancelScope(shield=True):
            await stop_all(self)

    async def _keep(self, node: LocalNode) -> None:
        """Wait for the ends of a node's processes, and start it anew, later each time, until it is to stay ended.

        Shielded: `aclose` is what ends nodes, and waits for this.
        """
        recent: deque[float] = deque()
        with trio.CancelScope(shield=True):
            await node.wait()
            while not node.stopping.is_set() and self._may_restart(node, recent):
                with trio.move_on_after(min(FIRST_PAUSE_S * 2 ** (len(recent) - 1), LONGEST_PAUSE_S)):
                    await node.stopping.wait()
                    break
                node.restarts += 1
                try:
                    await node.run(self._environment)
                except BrokenError as error:
                    _log.warning("%s", error)
                else:
                    _log.warning("%s runs again", node.name)
                    await node.wait()
        node.state = "ended" if node.stopping.is_set() or not self._limit.restarts else "failed"
        node.ended.set()

    def _may_restart(self, node: LocalNode, recent: deque[float]) -> bool:
        """Note an end of a node; return whether it may be restarted once more."""
        now = trio.current_time()
        while recent and recent[0] < now - self._within_s:
            recent.popleft()
        ended = f"ended with status {node.status}" if node.status >= 0 else f"was ended by signal {-node.status}"
        if len(recent) >= self._limit.restarts:
            node.reason = f"{ended}, after {len(recent)} restarts within {self._limit.within}; see {node.log}"
            if self._limit.restarts:
                _log.error("%s %s: it is not restarted again", node.name, node.reason)
            return False
        recent.append(now)
        node.state, node.reason = "restarting", ended
        _log.warning("%s %s: it is restarted", node.name, ended)
        return True


def _drain_s(plan: NodePlan) -> float:
    key = all_keys()["http.drain"]
    return float(key.read(plan.environment.get(key.variable, os.environ.get(key.variable, key.default))))


@asynccontextmanager
async def open_processes(
    folder: Path, ipc_folder: Path, limit: RestartLimit, settings: Mapping[str, str]
) -> AsyncIterator[LocalLauncher]:
    """Launch nodes within the scope, with files in the folder and variables for all; at its end all are ended.

    Cancellation: shielded while they end, each bounded by its drain.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        launcher = LocalLauncher(nursery, folder, ipc_folder, limit, settings)
        try:
            yield launcher
        except Exception as error:
            failure = error  # raised below: the nursery would wrap it
        finally:
            await launcher.aclose()
    if failure is not None:
        raise failure


@asynccontextmanager
async def open_launcher(spec: ClusterSpec, folder: Path) -> AsyncIterator[LocalLauncher]:
    """Launch and supervise the nodes of a cluster within the scope, and answer other shells; see LauncherModule.

    Cancellation: as open_processes.
    """
    limit = spec.launcher_section("local", RestartLimit)
    async with (
        open_processes(folder, sockets_folder(spec.name, folder), limit, {}) as launcher,
        serve_launcher(launcher, launcher.ipc_folder) as address,
    ):
        launcher.facts["control"] = address
        yield launcher


def sockets_folder(name: str, folder: Path) -> Path:
    """Return the folder for the sockets of a cluster, whose paths must be short; made as this user's alone."""
    make_private(default_folder())
    short = default_folder() / f"{name[:16]}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"
    make_private(short)
    return short


def short_folder() -> str | None:
    """Return where temporary folders go: as usual, unless TMPDIR is too long for the path of a socket (107 bytes)."""
    return None if len(os.fsencode(gettempdir())) <= LONGEST_TMPDIR else "/tmp"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody has now."""
    with socket.socket() as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])
