"""How other shells reach the process that supervises a local cluster: an actor over a socket in a folder of the user.

Both ends are here. Runs on the event loop; the folder (0700) is what protects the socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from asyncfabric.actors import Actor, Message, Reference, handles, open_node
from asyncfabric.control import LinkConfig, open_link
from asyncfabric.errors import PeerError
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.launcher import LaunchedNode, Launcher
from asyncfabric_services.launch.plan import NodePlan
from asyncfabric_services.launch.record import ClusterRecord

ACTOR = "launcher"


class StartNode(Message[LaunchedNode]):
    """Start a node."""

    plan: NodePlan


class StopNode(Message[None]):
    """Have a node drain and end for good."""

    name: str


class ListNodes(Message[list[LaunchedNode]]):
    """Report the nodes that were started and not stopped."""


class EndCluster(Message[None]):
    """End all nodes, and then the process that supervises them."""


class LauncherActor(Actor):
    """Does for other shells what the launcher of this process can."""

    mailbox_capacity: ClassVar[int] = 256
    concurrency: ClassVar[int] = 256

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @handles(StartNode)
    async def start_node(self, message: StartNode) -> LaunchedNode:
        """Start a node."""
        return await self._launcher.start(message.plan)

    @handles(StopNode)
    async def stop_node(self, message: StopNode) -> None:
        """Drain and end a node."""
        await self._launcher.stop(message.name)

    @handles(ListNodes)
    async def list_nodes(self, _: ListNodes) -> list[LaunchedNode]:
        """Report the nodes."""
        return await self._launcher.nodes()

    @handles(EndCluster)
    async def end_cluster(self, _: EndCluster) -> None:
        """End all nodes."""
        await self._launcher.aclose()


class AttachedLauncher:
    """The launcher of another process; made by `attach_launcher`."""

    def __init__(self, reference: Reference, facts: Mapping[str, str]) -> None:
        self.facts = facts
        self._reference = reference

    async def start(self, plan: NodePlan) -> LaunchedNode:
        """Start a node there; see Launcher.start. Raises RemoteError with what it raised.

        Cancellation: the start is taken back.
        """
        return await self._reference.ask(StartNode(plan))

    async def stop(self, name: str) -> None:
        """Have a node drain and end; see Launcher.stop.

        Cancellation: the node goes on ending.
        """
        await self._reference.ask(StopNode(name))

    async def nodes(self) -> list[LaunchedNode]:
        """Return the nodes there.

        Cancellation: nothing is left over.
        """
        return await self._reference.ask(ListNodes())

    async def aclose(self) -> None:
        """End the cluster; see Launcher.aclose.

        Cancellation: the cluster goes on ending.
        """
        await self._reference.ask(EndCluster())


@asynccontextmanager
async def serve_launcher(launcher: Launcher, ipc_folder: str) -> AsyncIterator[str]:
    """Answer other shells within the scope; gives the address for them.

    Cancellation: closing is shielded and bounded.
    """
    async with (
        open_link("launcher", bind="ipc", config=LinkConfig(ipc_folder=ipc_folder)) as link,
        open_node(link.identity.name, link) as node,
    ):
        await node.spawn(LauncherActor, launcher, name=ACTOR)
        yield link.address


@asynccontextmanager
async def attach_launcher(record: ClusterRecord, folder: Path) -> AsyncIterator[AttachedLauncher]:
    """Reach the process that supervises a running cluster; raises EnvironmentUnfit when it is gone.

    Cancellation: nothing is left over.
    """
    address = record.facts.get("control", "")
    ipc_folder = str(Path(address.removeprefix("ipc://")).parent)
    failure: Exception | None = None
    async with (
        open_link("operator", bind="ipc", config=LinkConfig(ipc_folder=ipc_folder, connect_deadline_s=2.0)) as link,
        open_node(link.identity.name, link) as node,
    ):
        try:
            there = await link.connect(address)
            yield AttachedLauncher(await node.lookup(there, ACTOR), record.facts)
        except PeerError as error:
            gone = f"the process that held {record.spec.name} is gone, and its nodes with it; see the logs in {folder}"
            failure = EnvironmentUnfit(gone)
            failure.__cause__ = error
        except Exception as error:
            failure = error  # raised below: a nursery would wrap it
    if failure is not None:
        raise failure
