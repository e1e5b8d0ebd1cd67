"""RankArrivals: what a lane waits for. A counter for each member, kind and step in flight, so nothing is ambiguous.

Runs on the event loop's thread. An immediate names the sender: `base + (kind, turn, sender)`, the same at all members,
so that one scatter reaches them all. A counter shared by several senders could not distinguish a fast one's next step
from a slow one's late step, and could not name who is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from math import inf

import anyio
from anyio.lowlevel import checkpoint

from asyncfabric import Fabric, ImmCounter, Peer, PeerError
from asyncfabric.moe.faults import missing, shortly_before_deadline


class ArrivalKind(IntEnum):
    """Kinds of messages between two members."""

    RECORD = 0
    REST = 1
    REST_TAKEN = 2
    BACK = 3
    BACK_TAKEN = 4


def immediates(members: int, in_flight: int) -> int:
    """Return how many immediates a lane needs."""
    return len(ArrivalKind) * in_flight * members


class RankArrivals:
    """The counters of one lane at one member, and how many arrivals each was seen to have."""

    def __init__(self, fabric: Fabric, base: int, in_flight: int, me: int, peers: Mapping[int, Peer]) -> None:
        """Open the counters of all members but `me`; raises BusyError when one of the immediates is taken."""
        self._base = base
        self._members = len(peers) + 1
        self._in_flight = in_flight
        self._me = me
        self._peers = peers
        self._seen: dict[tuple[ArrivalKind, int, int], int] = {}
        self._counters: dict[tuple[ArrivalKind, int, int], ImmCounter] = {}
        try:
            for kind in ArrivalKind:
                for turn in range(in_flight):
                    for member in peers:
                        self._counters[kind, turn, member] = fabric.counter(self._imm(kind, turn, member))
                        self._seen[kind, turn, member] = 0
        except BaseException:
            self.close()
            raise

    def imm(self, kind: ArrivalKind, turn: int) -> int:
        """Return the immediate of this member's messages."""
        return self._imm(kind, turn, self._me)

    def close(self) -> None:
        """Close all counters."""
        for counter in self._counters.values():
            counter.close()

    def absent(self, kind: ArrivalKind, turn: int, members: Iterable[int]) -> list[int]:
        """Return those of these members, this one not among them, whose next message is not there."""
        return [
            member for member in members if self._counters[kind, turn, member].value <= self._seen[kind, turn, member]
        ]

    async def wait(self, kind: ArrivalKind, turn: int, members: Sequence[int], what: str, names: Sequence[int]) -> None:
        """Return when the next message of each of these members is there; they then count as seen.

        Args:
            kind: of message.
            turn: of the step in flight.
            members: whose messages; this member is passed over.
            what: what is waited for, for the error.
            names: the rank of each member of the lane.

        Raises:
            MissingRankError: some of them are lost, or did not send before the caller's deadline.

        Cancellation: nothing is seen; the same wait may be made again.
        """
        others = [member for member in members if member != self._me]
        if absent := self.absent(kind, turn, others):
            await self._wait(kind, turn, absent, what, names)
        elif others:  # the fabric's checkpoint: a full turn of the event loop would cost more than the rest of this
            await self._counters[kind, turn, others[0]].wait(0)
        else:
            await checkpoint()
        for member in others:
            self._seen[kind, turn, member] += 1

    async def _wait(self, kind: ArrivalKind, turn: int, absent: list[int], what: str, names: Sequence[int]) -> None:
        if anyio.current_effective_deadline() == inf:
            await self._until(kind, turn, absent, what, names)
            return
        with shortly_before_deadline() as scope:
            await self._until(kind, turn, absent, what, names)
        if scope.cancelled_caught and (absent := self.absent(kind, turn, absent)):
            raise missing(what, (names[member] for member in absent), lost=False)

    async def _until(self, kind: ArrivalKind, turn: int, absent: list[int], what: str, names: Sequence[int]) -> None:
        while absent:
            first = absent[0]
            counter = self._counters[kind, turn, first]
            try:
                await counter.wait(self._seen[kind, turn, first] + 1, peers=[self._peers[member] for member in absent])
            except PeerError as error:
                still = self.absent(kind, turn, absent)
                lost = [member for member in still if self._peers[member].lost]
                if still and (lost or still == absent):  # else somebody left whose message is there
                    raise missing(what, (names[member] for member in lost or still), lost=True) from error
            absent = self.absent(kind, turn, absent)

    def _imm(self, kind: ArrivalKind, turn: int, member: int) -> int:
        return self._base + (kind * self._in_flight + turn) * self._members + member
