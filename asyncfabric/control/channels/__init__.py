"""Channels: typed messages between members by name, over links, a fabric, a store, or in process. No logic here.

`channel` has the protocol and its guarantees, `member` the end that users hold, and a file each what carries them.
"""

from asyncfabric.control.channels.channel import Channel, Codec, PeerFound, PeerLost
from asyncfabric.control.channels.fabric import FabricChannels
from asyncfabric.control.channels.fabric_sessions import MessageFabric
from asyncfabric.control.channels.link import LinkChannels
from asyncfabric.control.channels.local import LocalChannels
from asyncfabric.control.channels.member import Carrier, MemberChannel
from asyncfabric.control.channels.store import StoreChannels
from asyncfabric.control.channels.store_calls import KeyStore, connected_apart

__all__ = [
    "Carrier",
    "Channel",
    "Codec",
    "FabricChannels",
    "KeyStore",
    "LinkChannels",
    "LocalChannels",
    "MemberChannel",
    "MessageFabric",
    "PeerFound",
    "PeerLost",
    "StoreChannels",
    "connected_apart",
]
