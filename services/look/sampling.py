"""Asking a node for all that is shown of it, in one question. On the event loop."""

from __future__ import annotations

import trio

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.look.asking import MOST_BYTES, NoAnswer, exchange
from asyncfabric_services.look.rates import Sample
from asyncfabric_services.look.reports import LOOK


async def sample(url: str, patience_s: float, most_bytes: int = MOST_BYTES) -> Sample:
    """Return what the node at `url` reports now; a node that drains reports like any other.

    Raises:
        NoAnswer: nobody is there, the answer took too long, is longer than `most_bytes`, or is not that of a node.

    Cancellation: the connection is dropped.
    """
    answer = await exchange(url, "/look", patience_s, most_bytes=most_bytes)
    try:
        look = LOOK.decode(answer.body)
    except UNREADABLE:
        raise NoAnswer("its answer is not that of a node") from None
    return Sample(trio.current_time(), look.health, look.metrics, look.why, look.peers, look.updates)
