"""What a trainer and a rollout have in common: a fabric, a place in the cluster, and who else is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import trio

from asyncfabric import Fabric
from asyncfabric.actors import Membership, Node, labels_of, open_node
from asyncfabric.control import DirectoryClient, Link, LinkChannels
from asyncfabric.observe.metrics import FabricCollector
from asyncfabric.weights.update import WEIGHT_CODEC, WeightMessage
from asyncfabric_services.fanout.blueprint import WEIGHT_CHANNEL
from asyncfabric_services.health.view import Row
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.rails import open_rails
from asyncfabric_services.nodes.secret import open_member_link
from asyncfabric_services.nodes.stage import Stage, open_directory

_ROLES = ("coordinator", "trainer", "rollout")


@dataclass(frozen=True, slots=True)
class FanoutParticipant:
    """One process that weights come from or go to.

    Attributes:
        stage: the process.
        fabric: of the weights.
        link, node: its control plane.
        directory: where it is registered.
        membership: who is there.
        channels: messages between participants.
        nursery: ends with the participant.
    """

    stage: Stage
    fabric: Fabric
    link: Link
    node: Node
    directory: DirectoryClient
    membership: Membership
    channels: LinkChannels[WeightMessage]
    nursery: trio.Nursery

    async def carry_messages(self) -> None:
        """Carry messages to and from those who are there, once every channel of this process is open.

        Cancellation: only this ends.
        """
        await self.channels.run(self.directory, _ROLES)

    def regions(self) -> list[Row]:
        """Return the registered memory."""
        return [{"owner": "weights"} | asdict(region) for region in self.fabric.regions()]


@asynccontextmanager
async def open_participant(stage: Stage) -> AsyncIterator[FanoutParticipant]:
    """Hold everything open. Raises StartError for settings that cannot be used.

    Cancellation: what was posted drains.
    """
    async with (
        open_member_link(stage) as link,
        open_rails(stage.settings, stage.secret) as fabric,
        open_node(stage.condition.name, link) as node,
        open_directory(stage, link, labels_of(bytes(fabric.address))) as directory,
        trio.open_nursery() as nursery,
    ):
        FabricCollector(fabric, stage.registry)
        membership = Membership()
        nursery.start_soon(follow, directory, membership.apply)
        channels = LinkChannels(link, WEIGHT_CODEC, channel=WEIGHT_CHANNEL)
        yield FanoutParticipant(stage, fabric, link, node, directory, membership, channels, nursery)
        nursery.cancel_scope.cancel()
