"""Looking, without changing anything: who waits (`why`), what the machine has (`topology`), what was built."""

from asyncfabric.observe.build import Build, read_build
from asyncfabric.observe.topology import Topology, read_topology
from asyncfabric.observe.why import format_waiting

__all__ = ["Build", "Topology", "format_waiting", "read_build", "read_topology"]
