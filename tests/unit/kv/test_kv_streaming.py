"""Whole streams between pools, on the fake engine and on the native one, under both event loops: bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from kv_fixture import SHAPE, content_of, holds, idle, opening_of, prefill, streaming

import asyncfabric as af
from asyncfabric.control import LocalChannels
from asyncfabric.kv import KV_CODEC, KvCancel, KvChannel, KvLayout, member_name

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["fake", "native"])
def opening(request: pytest.FixtureRequest) -> Any:
    """How to open fabrics of one network."""
    return opening_of(request.param)


@pytest.mark.parametrize("per_layer", [False, True])
async def test_a_request_arrives_whole(opening: Any, per_layer: bool) -> None:
    layout = KvLayout(**SHAPE, context_bytes=64)
    async with streaming(opening, layout, layout) as found:
        async with (
            await found.pool.lease("request", tokens=30, context=True) as lease,
            found.inbox.request(
                lease, found.addresses, found.layout, 23, per_layer=per_layer, body=b"prompt"
            ) as request,
        ):
            if per_layer:
                for layer in range(3):
                    await request.wait_layer(layer)
            else:
                with pytest.raises(ValueError, match="per_layer"):
                    await request.wait_layer(0)
            await request.wait()
            assert not lease.exposed and lease.arrived == lease.expected == 3 * 6 + 1
            assert holds(found.pool, lease.pages, content_of(layout, 23))
            assert bytes(lease.context.memory) == bytes([7]) * 64
        await idle(found)
        assert found.pool.revoker.fences == 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("target_size", [1, 2, 4, 8])
@pytest.mark.parametrize("source_size", [1, 2, 4, 8])
async def test_every_pair_of_tensor_parallelisms(opening: Any, source_size: int, target_size: int, order: Any) -> None:
    """Bit for bit through a fabric, with grouped queries: 4 heads, so that 8 ranks keep each head twice."""
    shape = SHAPE | {"kv_heads": 4, "order": order}
    source = KvLayout(**shape, tp_size=source_size)
    ranks = (0, target_size - 1) if target_size > 1 else (0,)
    for rank in ranks:
        target = KvLayout(**(shape | {"page_tokens": 8 if rank else 4}), tp_size=target_size, tp_rank=rank)
        async with streaming(opening, source, target) as found:
            async with await found.pool.lease("request", tokens=21) as lease:
                async with found.inbox.request(lease, found.addresses, source, 21, rotation=rank) as request:
                    await request.wait()
                assert holds(found.pool, lease.pages, content_of(target, 21))
            await idle(found)


async def test_messages_go_over_any_channel_of_the_codec() -> None:
    """Whose members are called by their address; a message of one that is not is dropped."""
    layout = KvLayout(**SHAPE)
    local = LocalChannels(KV_CODEC)
    stranger = local.open("stranger")

    @asynccontextmanager
    async def open_channel(fabric: af.Fabric) -> AsyncIterator[KvChannel]:
        yield local.open(member_name(fabric.address))

    async with streaming(opening_of("fake"), layout, layout, open_channel=open_channel) as found:
        for address in (found.target.address, *found.addresses):
            await stranger.send(member_name(address), KvCancel(target=1, lease=1))
        async with await found.pool.lease("request", tokens=16) as lease:
            async with found.inbox.request(lease, found.addresses, layout, 16) as request:
                await request.wait()
            assert holds(found.pool, lease.pages, content_of(layout, 16))
        await idle(found)
        assert found.sources[0].outbox.forged == 0


async def test_mla_is_sent_once_by_turns(opening: Any) -> None:
    shape = SHAPE | {"kv_heads": 1, "order": "MLA", "head_dim": 9}
    source, target = KvLayout(**shape, tp_size=2), KvLayout(**shape, tp_size=4, tp_rank=3)
    async with streaming(opening, source, target) as found:
        async with await found.pool.lease("request", tokens=9) as lease:
            async with found.inbox.request(lease, found.addresses, source, 9) as request:
                await request.wait()
            assert lease.arrived == 3 * 3
            assert holds(found.pool, lease.pages, content_of(target, 9))
        await idle(found)


async def test_offers_longer_than_a_message_of_the_fabric(opening: Any) -> None:
    """3,000 pages need 12 KB in the offer; what is no piece and what is no message before it are dropped."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="uint8")
    async with streaming(opening, layout, layout, partial(prefill, chunk=1000), pages=3000) as found:
        source = found.sources[0]
        peer = await found.target.connect(source.fabric.address)
        for garbage in (b"", b"x" * 100):
            await found.target.send(peer, garbage)
        own = member_name(found.target.address)
        await found.channels[0]._carrier.carry(own, member_name(source.fabric.address), b"no message")
        lease = await found.pool.lease("request", pages=3000)
        async with lease, found.inbox.request(lease, found.addresses, layout, 3000) as request:
            await request.wait()
            assert holds(found.pool, lease.pages, content_of(layout, 3000))
        await idle(found)
        assert found.channels[1].refused == 1
