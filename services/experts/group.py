"""A conductor for the expert nodes of a directory: found, ordered by name, brought together. On the event loop."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from asyncfabric.actors import Membership, open_node
from asyncfabric.control import DirectoryClient, LinkConfig, open_link
from asyncfabric_services.experts.conductor import Conductor
from asyncfabric_services.experts.messages import EXPERT
from asyncfabric_services.nodes.members import follow


@asynccontextmanager
async def open_group(
    directory: str, nodes: int, *, ipc_folder: str = "", patience: float = 10.0
) -> AsyncIterator[Conductor]:
    """Wait for so many expert nodes of a directory on this host, bring them together and conduct them.

    Raises BrokenError when a node cannot join.

    Cancellation: nodes that were brought together stay so.
    """
    async with open_conductor(directory, nodes, ipc_folder=ipc_folder, patience=patience) as conductor:
        await conductor.seat()
        yield conductor


@asynccontextmanager
async def open_conductor(
    directory: str, nodes: int, *, ipc_folder: str = "", patience: float = 10.0
) -> AsyncIterator[Conductor]:
    """Wait for so many expert nodes of a directory on this host; they are not brought together yet.

    Cancellation: nothing was sent to the nodes.
    """
    failure: Exception | None = None
    async with (
        open_link("conductor", bind="ipc", config=LinkConfig(ipc_folder=ipc_folder)) as link,
        open_node(link.identity.name, link) as node,
        DirectoryClient(link, directory) as client,
        trio.open_nursery() as nursery,
    ):
        membership = Membership()
        nursery.start_soon(follow, client, membership.apply)
        members = (await membership.wait_for(EXPERT, nodes))[:nodes]
        for member in members:
            await link.connect(member.address)
        conductor = Conductor(node, nursery, members, secrets.token_hex(8), patience)
        try:
            yield conductor
        except Exception as error:
            failure = error  # raised below: a nursery would wrap it
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
