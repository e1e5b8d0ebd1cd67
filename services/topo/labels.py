"""How devices, speeds, sizes and CPU lists are written, in text and picture alike. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncfabric.observe.nvlink import NvLinks
from asyncfabric.observe.topology import Gpu, Group, Nic, NicKind, NumaNode, Topology

_KINDS = {
    NicKind.INFINIBAND: "InfiniBand",
    NicKind.ROCE: "RoCE",
    NicKind.EFA: "EFA",
    NicKind.IWARP: "iWARP",
    NicKind.ETHERNET: "Ethernet",
}


def cpu_list(cpus: Sequence[int]) -> str:
    """Return CPUs as Linux writes them: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs) if runs else "none"


def counted(count: int, thing: str) -> str:
    """Return "1 GPU", "8 GPUs"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def gpu_label(index: int, gpu: Gpu) -> str:
    """Return a GPU in one line."""
    model = gpu.model.removeprefix("NVIDIA ") or f"10de:{gpu.device_id:04x}"
    driver = "" if gpu.driver == "nvidia" else f", driver {gpu.driver}" if gpu.driver else ", no driver"
    return f"GPU {index}  {gpu.place.address}  {model}{driver}"


def up_label(gpu: Gpu, links: NvLinks) -> str:
    """Return how many NVLinks of a GPU work, "" where it has none."""
    known = next((one for one in links.gpus if one.address == gpu.place.address and one.links), None)
    return "" if known is None else f"  NVLink {known.up} of {known.links} up"


def link_lines(topology: Topology, links: NvLinks) -> list[str]:
    """Return for each GPU how many NVLinks lead to which others; GPUs with as many are named together."""
    numbers = {gpu.place.address: index for index, gpu in enumerate(topology.gpus)}
    lines = []
    for gpu, row in zip(links.gpus, links.between, strict=True):
        others: dict[int, list[str]] = {}
        for other, count in zip(links.gpus, row, strict=True):
            if count and other.address in numbers:
                others.setdefault(count, []).append(str(numbers[other.address]))
        if gpu.address in numbers and others:
            how = " over switches" if gpu.switched else ""
            stated = "; ".join(f"{count} to GPU {' '.join(named)}" for count, named in sorted(others.items()))
            lines.append(f"  {f'GPU {numbers[gpu.address]}':<6}  {stated}{how}")
    return lines


def nic_label(nic: Nic) -> str:
    """Return a NIC in one line."""
    speed = f" {nic.gbits_per_s:g} Gb/s" if nic.gbits_per_s else ""
    marks = [
        mark for mark, set_ in (("down", not nic.up), ("software", nic.software), ("VF", nic.virtual_function)) if set_
    ]
    netdevs = [name for name in nic.netdevs if name != nic.name]
    marks += [f"netdev {' '.join(netdevs)}"] if netdevs else []
    address = f"  {nic.place.address}" if nic.place.address else ""
    return f"{nic.name}{address}  {_KINDS[nic.kind]}{speed}" + (f" ({', '.join(marks)})" if marks else "")


def node_label(node: NumaNode) -> str:
    """Return a NUMA node in one line."""
    memory = f", {node.memory_bytes / 2**30:.0f} GiB" if node.memory_bytes else ""
    return f"NUMA node {node.id}: CPUs {cpu_list(node.cpus)}{memory}"


def headline(topology: Topology) -> str:
    """Return the machine in one line."""
    cpus = sum(len(node.cpus) for node in topology.nodes)
    allowed = "" if len(topology.allowed_cpus) == cpus else f" ({len(topology.allowed_cpus)} allowed)"
    parts = (
        counted(len(topology.nodes), "NUMA node"),
        counted(cpus, "CPU") + allowed,
        counted(len(topology.gpus), "GPU"),
        counted(len(topology.nics), "NIC"),
    )
    return ", ".join(parts)


def distances_of(topology: Topology, group: Group) -> str:
    """Return how far the NICs of a GPU's group are from it, "" for the host."""
    if group.gpu < 0 or not group.nics:
        return ""
    return " / ".join(distance.text for distance in sorted({topology.distances[group.gpu][nic] for nic in group.nics}))


def worker_label(group: Group) -> str:
    """Return where the worker of a group runs."""
    if group.worker_cpu < 0:
        return "worker not pinned"
    near = "" if group.cpus_are_near else ", NUMA node unknown" if group.numa_node < 0 else ", not on their NUMA node"
    return f"worker on CPU {group.worker_cpu}{near}"


def names_of(topology: Topology, nics: Iterable[int]) -> str:
    """Return NICs by name."""
    return " ".join(topology.nics[nic].name for nic in nics)
