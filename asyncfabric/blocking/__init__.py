"""The same fabric for callers without an event loop: from any thread, and from several at once.

    from asyncfabric import blocking

    with blocking.open_fabric() as fabric:
        region = fabric.allocate(1 << 20)
        transfer = fabric.write(region[0:4096], key_of_a_peer, 0, imm=7)
        transfer.done           # a flag
        transfer.wait()         # or transfer.wait(deadline=0.5), which raises TimeoutError and lets the transfer go on

Calls have the arguments of `asyncfabric.Fabric`; what is awaited there blocks the calling thread here. Deadlines are
seconds from the call. No thread of its own runs: whoever waits or looks takes the completions of all.
"""

from asyncfabric.blocking.counter import ImmCounter
from asyncfabric.blocking.fabric import Fabric
from asyncfabric.blocking.messages import MessageStream
from asyncfabric.blocking.opening import open_fabric
from asyncfabric.blocking.region import Region
from asyncfabric.blocking.transfer import Transfer, wait_all
from asyncfabric.blocking.watch import WatchWord

__all__ = [
    "Fabric",
    "ImmCounter",
    "MessageStream",
    "Region",
    "Transfer",
    "WatchWord",
    "open_fabric",
    "wait_all",
]
