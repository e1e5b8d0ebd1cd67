"""asyncfabric: awaitable one-sided transfers between the memories of processes, and what is built on them.

    import asyncfabric as af

    async with af.open_fabric() as fabric:
        region = await fabric.allocate(1 << 20)
        await fabric.write(region[0:4096], key_of_a_peer, 0, imm=7)

The front door re-exports and holds no logic. Layers, imports going down only: services (programs) - testing, bench -
blocking (the same for threads) - _api (what a user holds) - observe - _bridge (one Engine protocol; completions to
tasks, statuses to exceptions) - _native (compiled; native/ below it moves the bytes) - errors, types, config (common).
"""

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.counter import ImmCounter
from asyncfabric._api.data_ops import ScatterTarget
from asyncfabric._api.fabric import Fabric
from asyncfabric._api.key import RegionKey
from asyncfabric._api.messages import Message, MessageStream
from asyncfabric._api.opening import open_fabric
from asyncfabric._api.peer import Peer, PeerGroup, WarmReport
from asyncfabric._api.region import Region, RegionSlice
from asyncfabric._api.transfer import Transfer, wait_all
from asyncfabric._api.watch import WatchWord
from asyncfabric.config import FabricConfig, RailSpec
from asyncfabric.errors import (
    ActorDied,
    ActorError,
    BrokenError,
    BusyError,
    ClosedError,
    DeviceError,
    FabricError,
    InternalError,
    LocalProtocolError,
    PeerError,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    StaleKeyError,
    TransferError,
)
from asyncfabric.types import (
    MAX_IMM,
    AccessMode,
    PeerStatistics,
    RailInfo,
    RailLeftOut,
    RegionInfo,
    Statistics,
    TraceEvent,
    TransferResult,
    Waiting,
)

__all__ = [
    "MAX_IMM",
    "AccessMode",
    "ActorDied",
    "ActorError",
    "BrokenError",
    "BusyError",
    "ClosedError",
    "DeviceError",
    "Fabric",
    "FabricAddress",
    "FabricConfig",
    "FabricError",
    "ImmCounter",
    "InternalError",
    "LocalProtocolError",
    "Message",
    "MessageStream",
    "Peer",
    "PeerError",
    "PeerGroup",
    "PeerStatistics",
    "ProtocolError",
    "RailInfo",
    "RailLeftOut",
    "RailSpec",
    "Region",
    "RegionInfo",
    "RegionKey",
    "RegionSlice",
    "RemoteError",
    "RemoteProtocolError",
    "ScatterTarget",
    "StaleKeyError",
    "Statistics",
    "TraceEvent",
    "Transfer",
    "TransferError",
    "TransferResult",
    "Waiting",
    "WarmReport",
    "WatchWord",
    "open_fabric",
    "wait_all",
]
