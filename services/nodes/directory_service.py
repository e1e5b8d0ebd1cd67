"""`asyncfabric serve directory`: who is in the cluster. No model, no fabric, no torch in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from asyncfabric.control import Directory, Link, Node, SecretGrant, serve_directory
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import gauge
from asyncfabric_services.health.view import Row, View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.stage import HTTP_LABEL, Announce, Stage, open_control, serve_process
from asyncfabric_services.settings.readers import READERS, keys_of
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the directory open.

    Cancellation: the nodes keep their views.
    """
    async with open_control(stage) as link, serve_directory(link, grant=grant_of(stage)) as directory:
        gauge(stage.registry, "directory", "nodes", "Nodes that are in.").set_function(
            lambda: len(directory.table.nodes)
        )
        view = View(peers=lambda: link_rows(link), more={"nodes": lambda: node_rows(stage, link, directory)})
        routes = node_routes(stage.condition, stage.registry, view)
        yield Starlette(routes=[*routes, *Recorder(stage.condition.name, stage.spans).routes()])


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
