"""A Topology as a tree of boxes for drawing: NUMA nodes hold host bridges, these hold switches, these hold devices.

Pure. Bridges that only lead on are folded into what they lead to: a drawing shows where paths part, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncfabric.observe.nvlink import NvLinks
from asyncfabric.observe.topology import PciPlace, Topology
from asyncfabric_services.topo.labels import gpu_label, nic_label, node_label, up_label

BoxKind = Literal["machine", "node", "bridge", "gpu", "nic"]


@dataclass
class OutlineBox:
    """One box of the drawing. `partners`: who serves it or is served by it, for GPUs and NICs."""

    kind: BoxKind
    label: str
    children: list[OutlineBox] = field(default_factory=list)
    partners: str = ""


@dataclass
class _Branch:
    """A step of PCI paths while the tree grows."""

    name: str
    branches: dict[str, _Branch] = field(default_factory=dict)
    devices: list[OutlineBox] = field(default_factory=list)


def outline(topology: Topology, links: NvLinks) -> OutlineBox:
    """Return the whole machine as one box. Devices whose NUMA node is unknown hang below the machine itself."""
    roots: dict[int, _Branch] = {node.id: _Branch("") for node in topology.nodes}
    partners = _partners(topology)
    for index, gpu in enumerate(topology.gpus):
        box = OutlineBox("gpu", gpu_label(index, gpu) + up_label(gpu, links), partners=partners.get(("gpu", index), ""))
        _hang(roots, gpu.place, box)
    for index, nic in enumerate(topology.nics):
        _hang(roots, nic.place, OutlineBox("nic", nic_label(nic), partners=partners.get(("nic", index), "")))
    machine = OutlineBox("machine", "")
    for node in topology.nodes:
        machine.children.append(OutlineBox("node", node_label(node), _folded(roots[node.id])))
    if -1 in roots:
        machine.children.append(OutlineBox("node", "NUMA node unknown", _folded(roots[-1])))
    return machine


def _partners(topology: Topology) -> dict[tuple[str, int], str]:
    """Return GPU -> its NICs and NIC -> its GPUs, as text."""
    out: dict[tuple[str, int], str] = {}
    served: dict[int, list[int]] = {}
    for group in topology.groups:
        if group.gpu < 0:
            continue
        out["gpu", group.gpu] = ", ".join(topology.nics[nic].name for nic in group.nics) or "no NIC"
        for nic in group.nics:
            served.setdefault(nic, []).append(group.gpu)
    for nic, gpus in served.items():
        out["nic", nic] = "GPU " + " ".join(map(str, gpus))
    out |= {("nic", nic): "spare" for nic in topology.spare_nics if topology.gpus}
    return out


def _hang(roots: dict[int, _Branch], place: PciPlace, box: OutlineBox) -> None:
    branch = roots.setdefault(place.numa_node, _Branch(""))
    for step in place.path[:-1]:
        branch = branch.branches.setdefault(step, _Branch(step))
    branch.devices.append(box)


def _folded(branch: _Branch) -> list[OutlineBox]:
    """Return what hangs below a branch: a bridge with one thing below it becomes that thing, host bridges stay."""
    boxes = []
    for _, step in sorted(branch.branches.items()):
        below = _folded(step)
        host_bridge = step.name.startswith("pci")
        if len(below) == 1 and not host_bridge:
            boxes += below
        else:
            kind = "host bridge" if host_bridge else "switch" if len(step.branches) > 1 else "port"
            boxes.append(OutlineBox("bridge", f"{kind} {step.name}", below))
    return boxes + branch.devices
