"""Remote: a node's link put to work for actors: frames in and out, lost nodes. One pump for each stream of the link.

Runs on the event loop's thread. Bytes that are no frame are counted and logged, and never an exception (the sender may
be hostile); a caller whose frame cannot be read but whose number can gets a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio
from anyio.abc import ObjectReceiveStream

from asyncfabric.actors import wire
from asyncfabric.actors.incoming import IncomingCalls
from asyncfabric.actors.link import Arrival, Identity, Link, SessionChange
from asyncfabric.actors.outgoing import OutgoingCalls

if TYPE_CHECKING:
    from asyncfabric.actors.message import Message
    from asyncfabric.actors.node import Node
    from asyncfabric.actors.reference import Reference

logger: logging.Logger = logging.getLogger(__name__)


class Remote:
    """Calls to and from other nodes, over one link."""

    def __init__(self, node: Node, link: Link, cancel_deadline_s: float) -> None:
        self.protocol_errors: int = 0
        self._link = link
        self._outgoing = OutgoingCalls(link, cancel_deadline_s)
        self._incoming = IncomingCalls(node, link)

    async def run(self, started: Callable[[], None]) -> None:
        """Pump the link's streams until cancelled; calls `started` when calls can be made.

        Cancellation: ends the pumps, and the answers that were being sent.
        """
        async with (
            self._link.listen(wire.CHANNEL) as arrivals,
            self._link.watch() as changes,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._pump_changes, changes)
            started()
            with self._incoming.answering(nursery):
                async for arrival in arrivals:
                    self._receive(arrival)
            self._outgoing.lose_all("the link was closed")

    async def call(self, to: Reference, message: Message[Any], *, asked: bool) -> Any:
        """Send to an actor on another node, with or without an answer; see `OutgoingCalls.call`.

        Cancellation: as described there.
        """
        return await self._outgoing.call(to, message, asked=asked)

    async def lookup(self, node: Identity, name: str) -> int:
        """Return the incarnation of an actor on another node; see `OutgoingCalls.lookup`.

        Cancellation: as described there.
        """
        return await self._outgoing.lookup(node, name)

    async def _pump_changes(self, changes: ObjectReceiveStream[SessionChange]) -> None:
        async for change in changes:
            if change.state == "lost":
                self._outgoing.lose(change.peer, change.reason)
                self._incoming.lose(change.peer)

    def _receive(self, arrival: Arrival) -> None:
        try:
            frame = wire.decoded(arrival.body)
        except wire.UnknownFrame as error:
            self.protocol_errors += 1
            logger.warning("node %s sent %s", arrival.sender.name, error)
            if error.number is not None:
                refusal = wire.CallFailed(number=error.number, outcome="refused", reason=str(error))
                self._incoming.reply(arrival.sender, refusal)
            return
        if isinstance(frame, wire.Call | wire.Lookup | wire.CancelCall):
            self._incoming.receive(arrival.sender, frame, arrival.trace)
        else:
            self._outgoing.receive(arrival.sender, frame)
