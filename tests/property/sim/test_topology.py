"""Topology of random machines: reading never fails, shares are fair and as close as can be, always the same.

Trees mix everything: any depth of bridges, missing numbers, links that are down, several kinds of NICs, garbage.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_tree import ACTIVE, DOWN, MachineTree, Port

pytest.importorskip("asyncfabric._native._engine", reason="THE TOPOLOGY WAS NOT TESTED: `make build`")

from asyncfabric.observe.nvlink import SAVED_AS, read_nvlinks
from asyncfabric.observe.topology import Distance, NicKind, Topology, read_topology
from asyncfabric_services.topo.svg import draw_svg
from asyncfabric_services.topo.text import draw_text

COSTS = {
    Distance.SAME: 0,
    Distance.SWITCH: 1,
    Distance.ROOT_COMPLEX: 1 << 7,
    Distance.NODE: 1 << 14,
    Distance.FAR: 1 << 21,
}
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # hundreds of trees: a disk would take a minute
LAYERS = {NicKind.INFINIBAND: "InfiniBand", NicKind.ROCE: "Ethernet", NicKind.EFA: "Unknown"}


@dataclass(frozen=True)
class Device:
    """A GPU or a NIC of a random machine: host bridge, ports below it, and what it reports of itself."""

    bridge: int
    ports: tuple[int, ...]
    node: int
    kind: NicKind | None  # None: a GPU
    up: bool = True


def devices(kind: st.SearchStrategy[NicKind | None]) -> st.SearchStrategy[Device]:
    """Return devices at random places; few places, so that many share something."""
    ports = st.lists(st.integers(0, 1), max_size=3).map(tuple)
    return st.builds(
        Device, st.integers(0, 3), ports, st.integers(-1, 2), kind, st.sampled_from((True, True, True, False))
    )


KINDS = st.sampled_from((NicKind.INFINIBAND, NicKind.INFINIBAND, NicKind.ROCE, NicKind.EFA, NicKind.ETHERNET))
MACHINES = st.tuples(
    st.lists(devices(st.none()), max_size=6),
    st.lists(devices(KINDS), max_size=8),
    st.integers(1, 3),
    st.sampled_from(("0-11", "0-1", "4-7", "11", "", "nonsense", "90-99")),
)


def build(root: Path, machine: tuple[list[Device], list[Device], int, str]) -> MachineTree:
    """Write the tree of a random machine. Numbers of buses only need to be distinct."""
    gpus, nics, nodes, allowed = machine
    tree = MachineTree(root)
    tree.cpus(12, threads=2)
    tree.write("proc/self/status", f"Cpus_allowed_list:\t{allowed}")
    for node in range(nodes):
        tree.node(
            node, f"{4 * node}-{4 * node + 3}", [10 if node == other else 20 + node + other for other in range(nodes)]
        )
    buses = itertools.count(16)
    bridges: dict[str, str] = {}
    for index, device in enumerate((*gpus, *nics)):
        path = f"pci0000:{device.bridge:02x}"
        for port in device.ports:
            above = path
            path = bridges.get(f"{above}/{port}") or f"{above}/0000:{next(buses):02x}:{port:02x}.0"
            if f"{above}/{port}" not in bridges:
                tree.bridge(path, device.node)
            bridges[f"{above}/{port}"] = path
        path = f"{path}/0000:{next(buses):02x}:00.0"
        state = ACTIVE if device.up else DOWN
        if device.kind is None:
            tree.pci(path, 0x10DE, 0x2330, 0x030200, node=device.node)
        elif device.kind is NicKind.ETHERNET:
            card = tree.pci(path, 0x8086, 0x1592, 0x020000, node=device.node, driver="ice")
            tree.netdev(f"eth{index}", card, state="up" if device.up else "down")
        else:
            driver = "efa" if device.kind is NicKind.EFA else "mlx5_core"
            card = tree.pci(path, 0x15B3, 0x1021, 0x020700, node=device.node, driver=driver)
            tree.rdma(f"mlx5_{index}", card, Port(LAYERS[device.kind], state=state))
    return tree


def pool_of(topology: Topology) -> list[int]:
    """Return the NICs that serve some GPU."""
    return sorted({nic for group in topology.groups for nic in group.nics})


def best_sum(topology: Topology, pool: list[int]) -> int:
    """Return the smallest sum of distances over all fair ways to share the pool, by trying all of them."""
    gpus = range(len(topology.gpus))
    many, few = (pool, list(gpus)) if len(pool) >= len(gpus) else (list(gpus), pool)
    shares = {len(many) // len(few), -(-len(many) // len(few))}
    best = None
    for choice in itertools.product(few, repeat=len(many)):
        if not set(Counter(choice).values()) <= shares or len(set(choice)) < len(few):
            continue
        pairs = zip(choice, many, strict=True) if many is pool else zip(many, choice, strict=True)
        total = sum(COSTS[topology.distances[gpu][nic]] for gpu, nic in pairs)
        best = total if best is None else min(best, total)
    assert best is not None
    return best


@pytest.mark.slow
@settings(max_examples=60)
@given(MACHINES)
def test_random_machines(machine: tuple[list[Device], list[Device], int, str]) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        tree = build(Path(folder), machine)
        topology = read_topology(tree.root)
        assert read_topology(tree.root) == topology, "the same tree, another answer"
        links = read_nvlinks(tree.root)
        draw_text(topology, links)
        draw_svg(topology, links)
    assert len(topology.gpus) == len(machine[0])
    assert len(topology.nics) == len(machine[1])
    check_shares(topology)
    check_cpus(topology)


def check_shares(topology: Topology) -> None:
    """Who serves is up, of one kind, used fairly; who does not serve is spare or down; no NIC is both."""
    pool, gpus = pool_of(topology), len(topology.gpus)
    assert all(topology.nics[nic].up for nic in (*pool, *topology.spare_nics))
    assert len({topology.nics[nic].kind for nic in pool}) <= 1
    assert not set(pool) & set(topology.spare_nics)
    assert len(pool) + len(topology.spare_nics) == sum(nic.up for nic in topology.nics), "a NIC was forgotten"
    assert bool(pool) == any(nic.up for nic in topology.nics)
    if gpus and pool:
        counts = [len(group.nics) for group in topology.groups]
        used = Counter(nic for group in topology.groups for nic in group.nics)
        assert max(counts) - min(counts) <= 1
        assert max(used.values()) - min(used.values()) <= 1
        assert min(counts) >= 1
        if min(len(pool), gpus) ** max(len(pool), gpus) <= 5000:  # few enough to try them all
            pairs = [(group.gpu, nic) for group in topology.groups for nic in group.nics]
            assert sum(COSTS[topology.distances[gpu][nic]] for gpu, nic in pairs) == best_sum(topology, pool)
    elif gpus == 0:
        assert len(topology.groups) == 1


def check_cpus(topology: Topology) -> None:
    """Workers run where the process may, each on a core of its own."""
    online = {cpu for node in topology.nodes for cpu in node.cpus} | set(topology.allowed_cpus)
    assert topology.allowed_cpus
    assert set(topology.allowed_cpus) <= online
    pinned = [group.worker_cpu for group in topology.groups if group.worker_cpu >= 0]
    assert len({cpu % 6 for cpu in pinned}) == len(pinned), "two workers on one core"
    for group in topology.groups:
        assert group.cpus
        assert set(group.cpus) <= set(topology.allowed_cpus)
        assert group.worker_cpu == -1 or group.worker_cpu in group.cpus
        if group.cpus_are_near:
            (node,) = [node for node in topology.nodes if node.id == group.numa_node]
            assert set(group.cpus) <= set(node.cpus)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(devices(st.none()), min_size=2, max_size=2), st.integers(1, 3))
def test_distance_is_the_same_from_both_ends(pair: list[Device], nodes: int) -> None:
    here, there = pair
    seen = []
    for gpu, nic in ((here, there), (there, here)):
        with tempfile.TemporaryDirectory(dir=FAST) as folder:
            other = Device(nic.bridge, nic.ports, nic.node, NicKind.ROCE)
            seen.append(read_topology(build(Path(folder), ([gpu], [other], nodes, "0-11")).root).distances)
    assert seen[0] == seen[1]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=30)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.dictionaries(
        st.integers(0, 400), TEXTS | st.sampled_from(("-1", "0x", "9" * 40, "0-99999999", "4: ACTIVE")), max_size=25
    )
)
def test_garbage_in_any_file_does_no_harm(garbage: dict[int, str]) -> None:
    gpus = [Device(bridge, (0, bridge), bridge % 2, None) for bridge in range(3)]
    nics = [Device(bridge, (0, 1), bridge % 2, kind) for bridge, kind in enumerate(LAYERS)]
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        tree = build(Path(folder), (gpus, nics, 2, "0-11"))
        (tree.root / SAVED_AS).write_text("[]")
        files = sorted(path for path in tree.root.rglob("*") if path.is_file() and not path.is_symlink())
        for number, text in garbage.items():
            files[number % len(files)].write_text(text)
        topology = read_topology(tree.root)
        links = read_nvlinks(tree.root)
        draw_text(topology, links)
        draw_svg(topology, links)
    check_shares(topology)
