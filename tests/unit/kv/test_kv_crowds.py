"""Leaseholders that come and go for weeks: what a source keeps of each is a number, and it still counts (KV-3)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.messages import KvCancel, KvOffer, KvStopped, pack_pages
from asyncfabric.kv.protocol import CROWD, SourceAction, SourceMachine

PAGES = pack_pages(np.arange(2))
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="uint8")


def offer(target: int, lease: int) -> KvOffer:
    return KvOffer(
        target=target,
        lease=lease,
        reply_to=b"",
        layout=LAYOUT,
        digest="",
        tokens=2,
        rotation=0,
        pages=PAGES,
        pool_pages=6,
        pages_key=b"",
        context_key=b"",
        layer_imms=(1,),
        context_imm=1,
        remaining_ns=1,
    )


def serve(source: SourceMachine, target: int, lease: int) -> None:
    assert source.receive(offer(target, lease))[0] is SourceAction.START
    source.ended(target, lease, clean=True, complete=True)


@pytest.mark.slow
def test_a_leaseholder_that_is_gone_leaves_a_number_behind() -> None:
    source = SourceMachine()
    assert source.receive(offer(1, 5))[0] is SourceAction.START  # is served all the time
    for target in range(2, 2 + 4 * CROWD):
        serve(source, target, 3)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        many = range(10_000, 10_000 + 20 * CROWD)
        for target in many:
            serve(source, target, 3)
        grown = (tracemalloc.get_traced_memory()[0] - before) / len(many)
    finally:
        tracemalloc.stop()
    assert grown < 300, f"{grown:.0f} bytes for each"

    action, answer = source.receive(offer(2, 3))
    assert action is SourceAction.NOTHING and isinstance(answer, KvStopped) and not answer.clean
    serve(source, 2, 4)  # a newer lease of it is begun
    assert source.receive(KvCancel(target=1, lease=5))[0] is SourceAction.STOP
    assert source.active == ((1, 5),)
