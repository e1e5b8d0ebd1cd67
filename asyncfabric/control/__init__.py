"""Sessions between processes, messages over links (CURVE), channels of typed messages, and directories of names.

On the event loop's thread. Imports `errors` and `types` only; `zmq_wire` is the only importer of zmq.
"""

from asyncfabric.control.channels import (
    Carrier,
    Channel,
    Codec,
    FabricChannels,
    KeyStore,
    LinkChannels,
    LocalChannels,
    MemberChannel,
    MessageFabric,
    PeerFound,
    PeerLost,
    StoreChannels,
    connected_apart,
)
from asyncfabric.control.directory import DirectoryTable, Node, NodeChange
from asyncfabric.control.directory_client import DirectoryClient
from asyncfabric.control.directory_server import Directory, SecretGrant, serve_directory
from asyncfabric.control.events import Arrival, SessionChange
from asyncfabric.control.keys import LinkKeys, read_keys
from asyncfabric.control.link import Link
from asyncfabric.control.link_values import LinkConfig, LinkPeer, LinkStatistics
from asyncfabric.control.messages import Identity
from asyncfabric.control.stores import DirectoryStore, MemoryStore, open_store
from asyncfabric.control.zmq_link import open_link
from asyncfabric.control.zmq_wire import make_keys

__all__ = [
    "Arrival",
    "Carrier",
    "Channel",
    "Codec",
    "Directory",
    "DirectoryClient",
    "DirectoryStore",
    "DirectoryTable",
    "FabricChannels",
    "Identity",
    "KeyStore",
    "Link",
    "LinkChannels",
    "LinkConfig",
    "LinkKeys",
    "LinkPeer",
    "LinkStatistics",
    "LocalChannels",
    "MemberChannel",
    "MemoryStore",
    "MessageFabric",
    "Node",
    "NodeChange",
    "PeerFound",
    "PeerLost",
    "SecretGrant",
    "SessionChange",
    "StoreChannels",
    "connected_apart",
    "make_keys",
    "open_link",
    "open_store",
    "read_keys",
    "serve_directory",
]
