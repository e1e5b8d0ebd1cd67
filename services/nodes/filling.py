"""Having a prefill node compute a prompt into leased pages, while that node is in the cluster. On the event loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncfabric import FabricAddress, PeerError
from asyncfabric.actors import Membership, beside
from asyncfabric.kv import KvInbox, KvLease, KvRequest
from asyncfabric_services.nodes.members import until_gone
from asyncfabric_services.nodes.messages import PrefillSource, encode_prompt


async def fill(
    inbox: KvInbox,
    lease: KvLease,
    source: PrefillSource,
    prompt: Sequence[int],
    *,
    trace: str = "",
    membership: Membership | None = None,
) -> torch.Tensor:
    """Have a prefill node compute a prompt into the pages of a lease; returns the logits of the next token.

    With a `membership` the wait ends when the source is not in it any more: the fabric does not report a process that
    stands still. Raises what KvRequest.wait raises, and PeerError for a source that is gone or whose address is none.

    Cancellation: the source is ordered to stop and confirms, or is fenced off.
    """
    try:
        address = FabricAddress.from_bytes(source.address)
    except ValueError as error:  # the source's fault, not the request's
        raise PeerError(f"its address cannot be read: {error}", remedy="do both nodes run the same version?") from None
    if source.layout is None:
        raise PeerError("its engine does not take offers", remedy="prefill and decode nodes need the same --engine")
    body, names = encode_prompt(list(prompt)), [source.name]
    async with inbox.request(
        lease, [address], source.layout, len(prompt), trace=trace, body=body, names=names
    ) as asked:
        if membership is None:
            await asked.wait()
        else:
            await _wait(asked, source, membership)
    return torch.from_numpy(np.frombuffer(lease.context.memory, np.float32).copy())


async def _wait(asked: KvRequest, source: PrefillSource, membership: Membership) -> None:
    arrived = False
    async with beside() as tasks:

        async def end_when_gone() -> None:
            await until_gone(membership, source.address)
            tasks.cancel_scope.cancel()

        tasks.start_soon(end_when_gone)
        await asked.wait()
        arrived = True
    if not arrived:
        raise PeerError("it is not in the cluster any more", remedy="see its log; is the process stopped?")
