"""Sessions between processes, messages over links (CURVE), and the directory of names.

On the event loop's thread. Imports `errors` and `types` only; `zmq_wire` is the only importer of zmq.
"""

from asyncfabric.control.directory import DirectoryTable, Node, NodeChange
from asyncfabric.control.directory_client import DirectoryClient
from asyncfabric.control.directory_server import Directory, serve_directory
from asyncfabric.control.events import Arrival, SessionChange
from asyncfabric.control.keys import LinkKeys, read_keys
from asyncfabric.control.link import Link
from asyncfabric.control.link_values import LinkConfig, LinkPeer, LinkStatistics
from asyncfabric.control.messages import Identity
from asyncfabric.control.zmq_link import open_link
from asyncfabric.control.zmq_wire import make_keys

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
