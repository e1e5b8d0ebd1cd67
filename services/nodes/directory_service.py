"""`asyncfabric serve directory`: who is in the cluster. No model, no fabric, no torch in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio
from starlette.applications import Starlette

from asyncfabric import DeviceError
from asyncfabric.control import Directory, Link, Node, SecretGrant, open_store, serve_directory
from asyncfabric_services.dashboard.routes import open_dashboard
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import gauge
from asyncfabric_services.health.view import Row, View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.stage import HTTP_LABEL, Announce, Stage, open_control, serve_process
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.readers import READERS, keys_of
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the directory open.

    Raises StartError where `directory.store` cannot be used, or other directories of it have another secret.

    Cancellation: the nodes keep their views.
    """
    async with (
        open_control(stage) as link,
        serve_shared(stage, link) as directory,
        open_dashboard(link, lambda: node_rows(stage, link, directory), stage.stop) as dashboard,
    ):
        stage.condition.needs["store"] = lambda: directory.missing
        gauge(stage.registry, "directory", "nodes", "Nodes that are in.").set_function(
            lambda: len(directory.table.nodes)
        )
        view = View(peers=lambda: link_rows(link), more={"nodes": lambda: node_rows(stage, link, directory)})
        routes = [*node_routes(stage.condition, stage.registry, view), *dashboard]
        yield Starlette(routes=[*routes, *Recorder(stage.condition.name, stage.spans).routes()])


@asynccontextmanager
async def serve_shared(stage: Stage, link: Link) -> AsyncIterator[Directory]:
    """Serve the directory over the store that the settings name; waits for it, unless the node is to stop.

    Raises StartError, perhaps in a group, as `open_service`.

    Cancellation: the nodes keep their views.
    """
    serves = trio.Event()
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(_end_waiting, stage, serves)
        try:
            store = await stack.enter_async_context(open_store(stage.settings.directory.store))
            serving = serve_directory(link, grant=grant_of(stage), store=store)
            directory = await stack.enter_async_context(serving)
        except (DeviceError, ValueError) as error:
            raise StartError(f"directory.store: {error}") from error
        serves.set()
        yield directory
        nursery.cancel_scope.cancel()


async def _end_waiting(stage: Stage, serves: trio.Event) -> None:
    await stage.stop.wait()
    if not serves.is_set():
        stage.ending.cancel()


def grant_of(stage: Stage) -> SecretGrant | None:
    """Return the secret of the cluster's fabrics, for the roles that have one; None without keys."""
    if stage.keys is None:
        return None
    return SecretGrant(stage.keys.fabric_secret, {role for role in READERS if "cluster.rails" in keys_of(role)})


def node_rows(stage: Stage, link: Link, directory: Directory) -> list[Row]:
    """Return the nodes that are in, by name, and the directory itself in front: commands ask it like any other."""
    mine = Node(link.identity, stage.condition.role, link.address, {HTTP_LABEL: stage.http})
    return [
        {
            "name": node.identity.name,
            "role": node.role,
            "state": node.state,
            "http": node.labels.get(HTTP_LABEL, ""),
            "link": node.address,
            "incarnation": f"{node.identity.incarnation:x}",
        }
        for node in (mine, *sorted(directory.table.nodes.values(), key=lambda node: node.identity.name))
    ]


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "directory", open_service, announce)
