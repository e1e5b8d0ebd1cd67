"""What a machine has of GPUs, NICs, NUMA nodes and CPUs, how far apart they are, and which NICs serve which GPU.

A frozen view of what the native reader saw in one moment; reading takes milliseconds of file access, so do it on a
thread of its own when an event loop is waiting. Any thread. Nothing here opens a device or changes anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum

from asyncfabric._bridge.machine import (
    DISTANCE_TEXTS,
    NativeGroup,
    NativeNic,
    NativePlace,
    NativeTopology,
    NicKind,
)
from asyncfabric._bridge.native import read_native_topology

__all__ = ["Distance", "Gpu", "Group", "Nic", "NicKind", "NumaNode", "PciPlace", "Topology", "read_topology"]


class Distance(IntEnum):
    """How far a GPU is from a NIC, nearest first; numbers of the native enum."""

    SAME = 0
    SWITCH = 1
    ROOT_COMPLEX = 2
    NODE = 3
    FAR = 4

    @property
    def text(self) -> str:
        """The distance as people write it."""
        return DISTANCE_TEXTS[self]


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a device sits.

    Attributes:
        address: its PCI address as `lspci -D` prints it, "" when it has none.
        path: from the host bridge over bridges and switch ports to the device; empty when the machine does not report.
        numa_node: -1 when the machine does not report.
    """

    address: str
    path: tuple[str, ...]
    numa_node: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node.

    Attributes:
        id: its number.
        cpus: the online CPUs on it.
        distances: to each node of the machine, in the order of `Topology.nodes`; 10 is local.
        memory_bytes: its memory, 0 when unknown.
        nics: indices of the usable NICs, nearest first: for buffers in the memory of this node.
    """

    id: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]
    memory_bytes: int
    nics: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU. Indices follow PCI addresses, as with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Attributes:
        place: where it sits.
        device_id: PCI device id, 0x2335 is an H200.
        driver: kernel driver, "" when none is bound.
        model: as the driver calls it, "" when it is not there to report it.
    """

    place: PciPlace
    device_id: int
    driver: str
    model: str


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC: an RDMA device, or a network interface that belongs to none.

    Attributes:
        name: of the RDMA device (mlx5_0), or of the interface.
        kind: what it speaks.
        place: where it sits; a software device sits where its interface does.
        netdevs: network interfaces of the same device.
        gbits_per_s: speed of its fastest active port, 0 when unknown.
        up: at least one port is active.
        software: rdma_rxe or siw over somebody else's interface.
        virtual_function: and its physical function is visible here too.
    """

    name: str
    kind: NicKind
    place: PciPlace
    netdevs: tuple[str, ...]
    gbits_per_s: float
    up: bool
    software: bool
    virtual_function: bool


@dataclass(frozen=True, slots=True)
class Group:
    """What one worker thread drives: a GPU with its NICs, or the host's memory with its NICs.

    Attributes:
        gpu: index into `Topology.gpus`, -1 for the host.
        nics: indices into `Topology.nics`.
        numa_node: node of most of its NICs, -1 when unknown.
        cpus: CPUs where its worker should run.
        cpus_are_near: False when the process may not run on that node, or nobody knows it.
        worker_cpu: the core to pin the worker to; -1 when there are too few cores to give one away.
    """

    gpu: int
    nics: tuple[int, ...]
    numa_node: int
    cpus: tuple[int, ...]
    cpus_are_near: bool
    worker_cpu: int


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine, and which of its NICs serve which GPU.

    Attributes:
        nodes: NUMA nodes, at least one.
        allowed_cpus: online CPUs on which the process may run.
        gpus: GPUs by PCI address.
        nics: RDMA devices first, then interfaces.
        groups: one for each GPU, or one for the host when there is none.
        spare_nics: usable NICs that serve no GPU: of another kind, or farther than what each GPU has.
        distances: a row for each GPU, a column for each NIC.
        notes: what was odd on this machine, and how it was taken.
    """

    nodes: tuple[NumaNode, ...]
    allowed_cpus: tuple[int, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    groups: tuple[Group, ...]
    spare_nics: tuple[int, ...]
    distances: tuple[tuple[Distance, ...], ...]
    notes: tuple[str, ...]


def read_topology(root: str | os.PathLike[str] = "/") -> Topology:
    """Read the topology of this machine, or of the one whose `sys` and `proc` were copied to the folder `root`.

    Files that cannot be read are taken for absent; what was odd is in `notes`.

    Raises:
        DeviceError: the compiled engine is not there.
    """
    return _view(read_native_topology(os.fspath(root)))


def _view(native: NativeTopology) -> Topology:
    return Topology(
        nodes=tuple(
            NumaNode(
                node["id"], tuple(node["cpus"]), tuple(node["distances"]), node["memory_bytes"], tuple(node["nics"])
            )
            for node in native["nodes"]
        ),
        allowed_cpus=tuple(native["allowed_cpus"]),
        gpus=tuple(Gpu(_place(gpu["place"]), gpu["device_id"], gpu["driver"], gpu["model"]) for gpu in native["gpus"]),
        nics=tuple(_nic(nic) for nic in native["nics"]),
        groups=tuple(_group(group) for group in native["groups"]),
        spare_nics=tuple(native["spare_nics"]),
        distances=tuple(tuple(Distance(number) for number in row) for row in native["distances"]),
        notes=tuple(native["notes"]),
    )


def _place(place: NativePlace) -> PciPlace:
    return PciPlace(place["address"], tuple(place["path"]), place["numa_node"])


def _nic(nic: NativeNic) -> Nic:
    return Nic(
        name=nic["name"],
        kind=NicKind(nic["kind"]),
        place=_place(nic["place"]),
        netdevs=tuple(nic["netdevs"]),
        gbits_per_s=nic["gbits_per_s"],
        up=nic["up"],
        software=nic["software"],
        virtual_function=nic["virtual_function"],
    )


def _group(group: NativeGroup) -> Group:
    return Group(
        gpu=group["gpu"],
        nics=tuple(group["nics"]),
        numa_node=group["numa_node"],
        cpus=tuple(group["cpus"]),
        cpus_are_near=group["cpus_are_near"],
        worker_cpu=group["worker_cpu"],
    )
