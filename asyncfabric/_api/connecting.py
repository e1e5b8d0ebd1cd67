"""How peers are connected and disconnected: one, or many at once.

Runs on the event loop's thread, or in a step of a fabric of threads; the engine connects on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.checks import checked_iterable
from asyncfabric._api.control import ControlCall, submit_control
from asyncfabric._api.peer import Peer, WarmReport
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.errors import FabricError

if TYPE_CHECKING:
    from asyncfabric._api.peers_known import PeersKnown
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


async def connect_peer(dispatcher: CompletionDispatcher, peers: PeersKnown, address: FabricAddress | bytes) -> Peer:
    """Connect to an address.

    Cancellation: the connecting goes on in the engine; only the wait for it ends.
    """
    parsed = _address(address)
    return await _connected(peers, _submit_connect(dispatcher, parsed), parsed)


async def disconnect_peer(dispatcher: CompletionDispatcher, peer: Peer, peer_id: int) -> None:
    """Drop the connection to a peer.

    Cancellation: the disconnecting goes on in the engine; only the wait for it ends.
    """
    call = submit_control(dispatcher, f"disconnecting {peer!r}", dispatcher.engine.submit_disconnect, peer_id)
    await call.wait()


async def warm_peers(
    dispatcher: CompletionDispatcher, peers: PeersKnown, addresses: Iterable[FabricAddress | bytes]
) -> list[WarmReport]:
    """Connect to many addresses at once; one report for each, in order.

    Cancellation: the connecting goes on in the engine; only the wait for it ends.
    """
    if isinstance(addresses, (FabricAddress, bytes, str)):
        raise TypeError(f"warm() takes a list of addresses, got one {type(addresses).__name__}")
    begin = monotonic()
    parsed = [_address(address) for address in checked_iterable("addresses", addresses, "addresses")]
    submitted: list[tuple[FabricAddress, ControlCall | None, FabricError | None]] = []
    for address in parsed:
        try:
            submitted.append((address, _submit_connect(dispatcher, address), None))
        except FabricError as refusal:
            submitted.append((address, None, refusal))
    outcomes: list[tuple[FabricAddress, Peer | None, FabricError | None, float]] = []
    for address, call, error in submitted:
        peer = None
        if call is not None:
            try:
                peer = await _connected(peers, call, address)
            except FabricError as failure:
                error = failure
        outcomes.append((address, peer, error, monotonic() - begin))
    carried = peers.providers()
    return [
        WarmReport(address, peer, carried.get(peer.id, "") if peer is not None else "", error, duration)
        for address, peer, error, duration in outcomes
    ]


def _submit_connect(dispatcher: CompletionDispatcher, address: FabricAddress) -> ControlCall:
    what = f"connecting to {address!r}"
    try:
        incarnation = dispatcher.engine.check_address(address.engine_bytes)
    except EngineStatusError as error:
        raise faults.refused(error, faults.FailedCall(what)) from None
    if incarnation != address.incarnation:
        raise ValueError(f"{address!r} is damaged: its engine bytes are of incarnation {incarnation:016x}")
    return submit_control(dispatcher, what, dispatcher.engine.submit_connect, address.engine_bytes)


async def _connected(peers: PeersKnown, call: ControlCall, address: FabricAddress) -> Peer:
    peer = peers.by_id(await call.wait(), address)
    peers.check_provider(peer)
    return peer


def _address(address: object) -> FabricAddress:
    if isinstance(address, FabricAddress):
        return address
    if isinstance(address, bytes):
        return FabricAddress.from_bytes(address)
    kind = type(address).__name__
    raise TypeError(f"expected a FabricAddress or its bytes, got {kind}; FabricAddress.parse() reads text")
