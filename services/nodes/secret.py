"""The secret of a node's fabric: the directory's, given over the node's link, so that no setting names it.

On the event loop, before the fabric is opened. Without `cluster.keys` there is none, and the log has that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from asyncfabric import PeerError
from asyncfabric.control import DirectoryClient, Link
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.nodes.stage import Stage, directory_address, open_control
from asyncfabric_services.terminal import plain

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_member_link(stage: Stage) -> AsyncIterator[Link]:
    """Open the link of a node that has a fabric, and take the fabric's secret; see open_control and take_secret.

    Cancellation: closing is shielded and bounded.
    """
    async with open_control(stage) as link:
        await take_secret(stage, link)
        yield link


async def take_secret(stage: Stage, link: Link) -> None:
    """Set `stage.secret` to what the directory gives; None without `cluster.keys`. Waits for the directory.

    Raises StartError when the settings name no directory, EnvironmentUnfit when the directory refuses the node for good
    or gives it no secret. A node that is to stop meanwhile ends by `stage.ending`.

    Cancellation: only this wait ends.
    """
    if stage.settings.cluster.keys is None:
        _log.warning(
            "the fabric is open: whoever reaches its rails (%s) is a peer; give all nodes cluster.keys, see "
            "`asyncfabric keys`, and it has a secret",
            stage.settings.cluster.rails,
        )
        return
    async with DirectoryClient(link, directory_address(stage.settings)) as client, trio.open_nursery() as nursery:
        nursery.start_soon(_end_stopped, stage)
        try:
            stage.secret = await client.fabric_secret()
        except PeerError as error:
            reason = plain(str(error.args[0]))
            stage.condition.fail(reason)
            raise EnvironmentUnfit(f"{reason}; all nodes of a cluster, its directory too, need keys") from error
        nursery.cancel_scope.cancel()


async def _end_stopped(stage: Stage) -> None:
    await stage.stop.wait()
    stage.ending.cancel()
