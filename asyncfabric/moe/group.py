"""MoeGroup: who takes part in an exchange, and how its ranks are connected.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio.lowlevel

from asyncfabric import Fabric, FabricAddress, FabricError, Peer
from asyncfabric.moe.cards import CardChannel
from asyncfabric.moe.faults import missing


@dataclass(frozen=True)
class MoeGroup:
    """The ranks of an exchange, as one of them sees it.

    Attributes:
        rank: of this process.
        addresses: the fabric of each rank, in the order of ranks; the own one included.
        tag: distinguishes the exchanges of one fabric; the same on all ranks.
        channel: carries the keys of the ranks when the exchange opens: a Channel of CARD_CODEC whose members are called
            by the address of their fabric, `str(fabric.address)`, and which nobody else receives from. None: the
            messages of the fabric do, all of which are taken while an exchange of the fabric opens.
    """

    rank: int
    addresses: Sequence[FabricAddress]
    tag: str = "moe"
    channel: CardChannel | None = None

    def __post_init__(self) -> None:
        """Check that the group is one."""
        if not 0 <= self.rank < len(self.addresses):
            raise ValueError(f"rank must be in 0..{len(self.addresses) - 1}, got {self.rank}")
        if len({address.incarnation for address in self.addresses}) != len(self.addresses):
            raise ValueError("two ranks have the same address; each rank has a fabric of its own")


async def connect_ranks(fabric: Fabric, group: MoeGroup, ranks: Iterable[int]) -> dict[int, Peer]:
    """Connect to some ranks of a group, the own one left out, and return the peers by rank.

    Raises:
        MissingRankError: one of them cannot be reached.

    Cancellation: connecting goes on in the engine; only the wait for it ends.
    """
    peers = {}
    for rank in sorted(set(ranks) - {group.rank}):
        try:
            peers[rank] = await fabric.connect(group.addresses[rank])
        except FabricError as error:
            raise missing(f"opening the exchange {group.tag!r} ({error})", [rank], lost=True) from error
    await anyio.lowlevel.checkpoint()
    return peers
