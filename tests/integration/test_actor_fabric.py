"""The peer keeper and the region ledger over real fabrics: their protocols are those of Fabric and Region."""

from __future__ import annotations

import pytest
import trio

import asyncfabric as af
from asyncfabric.actors import Identity, RegionLedger, open_peer_keeper
from asyncfabric.errors import ClosedError, PeerError

pytestmark = [pytest.mark.trio, pytest.mark.slow]
LOCAL = af.FabricConfig(rails=("local",), connect_deadline=1.0)


async def test_a_real_peer_is_kept_dropped_and_replaced() -> None:
    first, second = Identity("far", 1), Identity("far", 2)
    with trio.fail_after(30):
        async with af.open_fabric(LOCAL) as near, open_peer_keeper(near) as keeper:
            async with af.open_fabric(LOCAL) as far:
                keeper.join(first, bytes(far.address))
                peer = await keeper.wait_peer(first)
                assert (peer.incarnation, peer.lost) == (far.address.incarnation, False)
                keeper.report_broken(first)
                assert not (await keeper.wait_peer(first)).lost
            async with af.open_fabric(LOCAL) as again:
                keeper.join(second, bytes(again.address))
                peer = await keeper.wait_peer(second)
                assert peer.incarnation == again.address.incarnation
                with pytest.raises(PeerError):
                    await keeper.wait_peer(first)
                assert keeper.kept == (second,)


async def test_real_regions_are_released_with_their_owner() -> None:
    ledger = RegionLedger()
    with trio.fail_after(30):
        async with af.open_fabric(LOCAL) as fabric:
            async with ledger.open_owner("pool") as owner:
                region = await owner.register(lambda: fabric.allocate(1 << 16))
                with ledger.lease(region):
                    assert [(row.owner, row.bytes, row.leases) for row in ledger.rows()] == [("pool", 1 << 16, 1)]
            assert region.released
            with pytest.raises(ClosedError), ledger.lease(region):
                pass
