"""What crosses the border when a machine's topology is read: plain dicts, made by cython_ext/topology.pxi.

Types only. `asyncfabric.observe.topology` names the fields and explains them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypedDict


class NicKind(IntEnum):
    """What a NIC speaks; numbers of the native enum."""

    INFINIBAND = 0
    ROCE = 1
    EFA = 2
    IWARP = 3
    ETHERNET = 4


DISTANCE_TEXTS = ("same device", "same switch", "same root complex", "same NUMA node", "other NUMA node")
"""How far a GPU is from a NIC, by the numbers of the native enum."""


class NativePlace(TypedDict):
    """Where a device sits."""

    address: str
    path: list[str]
    numa_node: int


class NativeNode(TypedDict):
    """A NUMA node."""

    id: int
    cpus: list[int]
    distances: list[int]
    memory_bytes: int
    nics: list[int]


class NativeGpu(TypedDict):
    """A GPU."""

    place: NativePlace
    device_id: int
    driver: str
    model: str


class NativeNic(TypedDict):
    """A NIC."""

    name: str
    kind: int
    place: NativePlace
    netdevs: list[str]
    gbits_per_s: float
    up: bool
    software: bool
    virtual_function: bool


class NativeGroup(TypedDict):
    """A GPU, or the host, and its NICs."""

    gpu: int
    nics: list[int]
    numa_node: int
    cpus: list[int]
    cpus_are_near: bool
    worker_cpu: int


class NativeTopology(TypedDict):
    """The whole machine; `distances` has a row for each GPU and a column for each NIC."""

    nodes: list[NativeNode]
    allowed_cpus: list[int]
    gpus: list[NativeGpu]
    nics: list[NativeNic]
    groups: list[NativeGroup]
    spare_nics: list[int]
    notes: list[str]
    distances: list[list[int]]
