"""What a prefill or decode node asks of the engine in it: two protocols.

On the event loop. The programs of the nodes are decode_service and prefill_service; an engine knows no router and no
directory, and reaches other nodes through `Cluster` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from asyncfabric import Fabric
from asyncfabric.actors import Membership, Node
from asyncfabric.control import Link
from asyncfabric_services.health.view import View
from asyncfabric_services.nodes.messages import Generate
from asyncfabric_services.nodes.names import NodeNames


@dataclass(frozen=True, slots=True)
class Cluster:
    """The node's place among others: its actors, its link, and who is in."""

    node: Node
    link: Link
    membership: Membership


class ServingEngine(Protocol):
    """What engines of both roles have."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Return the labels that the node registers with."""

    @property
    def fabric(self) -> Fabric | None:
        """Return the fabric whose events a recording holds, None when it is in another process."""

    def view(self, link: Link, names: NodeNames) -> View:
        """Return what the node shows of itself."""


class PrefillEngine(ServingEngine, Protocol):
    """Computes prompts for engines of decode nodes."""

    async def join(self, node: Node) -> None:
        """Spawn the actors that decode nodes ask; none where they ask by the fabric.

        Cancellation: the node is not to be used.
        """

    def drain(self) -> None:
        """Take no new prompts."""


class DecodeEngine(ServingEngine, Protocol):
    """Generates answers from prompts that prefill nodes compute."""

    def generate(
        self, request: Generate, *, deadline: float, context: str, cluster: Cluster
    ) -> AbstractAsyncContextManager[AsyncIterator[list[int]]]:
        """Generate an answer within the scope; what is iterated are its tokens as they come.

        `deadline` is on trio's clock, `context` the trace of the request. Raises, on entry or from the iterator,
        BusyError when there is no room now, ValueError for what can never be answered, BrokenError when no source
        could compute the prompt or the engine failed, ClosedError when it stops.

        Cancellation: the source stops, and blocks of the request are free, or go free when nothing writes to them.
        """
