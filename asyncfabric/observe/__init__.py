"""Looking, without changing anything: who waits (`why`), what the machine has (`topology`), what was built."""

from asyncfabric.observe.build import built_providers
from asyncfabric.observe.topology import Topology, read_topology
from asyncfabric.observe.why import format_waiting

__all__ = ["Topology", "built_providers", "format_waiting", "read_topology"]
