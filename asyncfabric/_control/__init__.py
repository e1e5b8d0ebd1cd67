"""The stairs: who is alive, what they say to each other, who has which name. Messages, sessions, links, directory.

On the event loop's thread. Imports errors and types of the hall only; `zmq_wire` is the only importer of zmq.
"""

from asyncfabric._control.directory import DirectoryTable, Node, NodeChange
from asyncfabric._control.directory_client import DirectoryClient
from asyncfabric._control.directory_server import Directory, serve_directory
from asyncfabric._control.events import Arrival, SessionChange
from asyncfabric._control.keys import LinkKeys, read_keys
from asyncfabric._control.link import Link
from asyncfabric._control.link_values import LinkConfig, LinkPeer, LinkStatistics
from asyncfabric._control.messages import Identity
from asyncfabric._control.zmq_link import open_link
from asyncfabric._control.zmq_wire import make_keys

__all__ = [
    "Arrival",
    "Directory",
    "DirectoryClient",
    "DirectoryTable",
    "Identity",
    "Link",
    "LinkConfig",
    "LinkKeys",
    "LinkPeer",
    "LinkStatistics",
    "Node",
    "NodeChange",
    "SessionChange",
    "make_keys",
    "open_link",
    "read_keys",
    "serve_directory",
]
