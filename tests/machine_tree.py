"""Builds sys/ and proc/ trees of machines as Linux lays them out: real folders below devices/, relative links to them
from bus/ and class/, attributes with their real formats. `machines.py` has the machines; tests plant oddities with
`write`, `unplug` and friends. Knows nothing of what asyncfabric makes of a tree.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ACTIVE, DOWN = "4: ACTIVE", "1: DOWN"
CA, RNIC, UNSPECIFIED = "1: CA", "4: RNIC", "7: <unknown>"  # as node_type shows them; EFA is of the last kind


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device."""

    link_layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    state: str = ACTIVE
    gids: tuple[tuple[str, str, str], ...] = ()  # (address, type, interface)
    netdev_mtu: int = 0


class MachineTree:
    """A tree below `root`; every method returns the folder that it made, relative to the root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | bytes) -> None:
        """Write one file, with the folders above it."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            file.write_bytes(text)
        else:
            file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        """Make a relative link, as sysfs has them."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def node(self, number: int, cpus: str, distances: Sequence[int], memory_gib: int = 64) -> None:
        """Add a NUMA node."""
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(f"{folder}/distance", " ".join(map(str, distances)))
        self.write(
            f"{folder}/meminfo", f"Node {number} MemTotal:       {memory_gib << 20} kB\nNode {number} MemFree: 1 kB"
        )

    def cpus(self, count: int, *, threads: int = 1, allowed: str = "") -> None:
        """Add CPUs; with two threads, CPU n and n + count / 2 are one core, as Linux numbers them on x86."""
        base = "sys/devices/system/cpu"
        self.write(f"{base}/online", f"0-{count - 1}")
        cores = count // threads
        for cpu in range(count):
            siblings = [str(cpu % cores + cores * thread) for thread in range(threads)]
            self.write(f"{base}/cpu{cpu}/topology/thread_siblings_list", ",".join(siblings))
        self.allow(allowed or f"0-{count - 1}")

    def allow(self, cpus: str) -> None:
        """State which CPUs the process may run on."""
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}")

    def pci(
        self, path: str, vendor: int, device: int, kind: int, *, node: int = -1, driver: str = "", local_cpus: str = ""
    ) -> str:
        """Add a PCI device. `path` is like "pci0000:15/0000:15:01.0/0000:16:00.0"; parents have calls of their own."""
        folder = f"sys/devices/{path}"
        address = path.rpartition("/")[2]
        self.write(f"{folder}/vendor", f"0x{vendor:04x}")
        self.write(f"{folder}/device", f"0x{device:04x}")
        self.write(f"{folder}/class", f"0x{kind:06x}")
        self.write(f"{folder}/numa_node", str(node))
        self.write(f"{folder}/uevent", f"PCI_CLASS={kind:X}\nPCI_ID={vendor:04X}:{device:04X}\nPCI_SLOT_NAME={address}")
        if local_cpus:
            self.write(f"{folder}/local_cpulist", local_cpus)
        self.link(f"sys/bus/pci/devices/{address}", folder)
        if driver:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
        return folder

    def bridge(self, path: str, node: int = -1, *, vendor: int = 0x1000, device: int = 0xC030) -> str:
        """Add a PCI bridge: a root port, or an up- or downstream port of a switch."""
        return self.pci(path, vendor, device, 0x060400, node=node, driver="pcieport")

    def rdma(self, name: str, device: str, *ports: Port, node_type: str = CA, netdevs: Sequence[str] = ()) -> str:
        """Add an RDMA device of the PCI device in `device`; "" makes a software one."""
        folder = f"{device}/infiniband/{name}" if device else f"sys/devices/virtual/infiniband/{name}"
        self.write(f"{folder}/node_type", node_type)
        for number, port in enumerate(ports, 1):
            at = f"{folder}/ports/{number}"
            self.write(f"{at}/state", port.state)
            self.write(f"{at}/rate", port.rate)
            self.write(f"{at}/link_layer", port.link_layer)
            for index, (address, kind, interface) in enumerate(port.gids):
                self.write(f"{at}/gids/{index}", address)
                self.write(f"{at}/gid_attrs/types/{index}", kind)
                self.write(f"{at}/gid_attrs/ndevs/{index}", interface)
        if device:
            self.link(f"{folder}/device", device)
        self.link(f"sys/class/infiniband/{name}", folder)
        for netdev in netdevs:
            self.netdev(netdev, device, kind=32 if ports and ports[0].link_layer == "InfiniBand" else 1)
        return folder

    def netdev(
        self, name: str, device: str, *, state: str = "up", mbits: int = 100_000, mtu: int = 1500, kind: int = 1
    ) -> str:
        """Add a network interface of the device in `device`; "" makes a virtual one."""
        folder = f"{device}/net/{name}" if device else f"sys/devices/virtual/net/{name}"
        self.write(f"{folder}/operstate", state)
        self.write(f"{folder}/speed", str(mbits))
        self.write(f"{folder}/mtu", str(mtu))
        self.write(f"{folder}/type", str(kind))
        if device:
            self.link(f"{folder}/device", device)
        self.link(f"sys/class/net/{name}", folder)
        return folder

    def unplug(self, device: str) -> None:
        """Take a device away, but leave the links to it, as a tree looks that was copied meanwhile."""
        shutil.rmtree(self.root / device)
