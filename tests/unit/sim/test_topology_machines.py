"""Topology of known machines: what is found, how far apart it is, who serves whom, where workers run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from machine_tree import DOWN, MachineTree, Port
from machines import MACHINES, NDR, NVIDIA, dgx_h100, flat_vm, laptop, own_bridges_vm, p5en_48xlarge

pytest.importorskip("asyncfabric._native._engine", reason="THE TOPOLOGY WAS NOT TESTED: `make build`")

from asyncfabric.observe.topology import Distance, NicKind, Topology, read_topology


def served(topology: Topology) -> dict[str, list[str]]:
    """Return GPU address -> names of its NICs."""
    return {
        topology.gpus[group.gpu].place.address: [topology.nics[nic].name for nic in group.nics]
        for group in topology.groups
        if group.gpu >= 0
    }


def test_p5en_gives_each_gpu_the_two_efa_of_its_switch(tmp_path: Path) -> None:
    topology = read_topology(p5en_48xlarge(tmp_path).root)
    assert [gpu.device_id for gpu in topology.gpus] == [0x2335] * 8
    efa = [nic for nic in topology.nics if nic.kind is NicKind.EFA]
    assert len(efa) == 16
    assert {nic.gbits_per_s for nic in efa} == {200.0}
    assert served(topology) == {
        f"0000:{0x43 + 16 * island:02x}:00.0": [f"rdmap{0x44 + 16 * island}s0", f"rdmap{0x45 + 16 * island}s0"]
        for island in range(8)
    }
    for group in topology.groups:
        assert {topology.distances[group.gpu][nic] for nic in group.nics} == {Distance.SWITCH}
        assert group.numa_node == group.gpu // 4
        assert group.worker_cpu in topology.nodes[group.numa_node].cpus
    assert [topology.nics[nic].name for nic in topology.spare_nics] == ["ens5"]


def test_p5en_workers_have_a_core_each_and_leave_cpu_0_alone(tmp_path: Path) -> None:
    topology = read_topology(p5en_48xlarge(tmp_path).root)
    cores = {group.worker_cpu % 96 for group in topology.groups}
    assert len(cores) == 8
    assert 0 not in cores


def test_dgx_compute_nics_serve_their_gpus_and_storage_stays_spare(tmp_path: Path) -> None:
    topology = read_topology(dgx_h100(tmp_path).root)
    assert list(served(topology).items()) == list(
        {
            "0000:1b:00.0": ["mlx5_0"],
            "0000:43:00.0": ["mlx5_3"],
            "0000:52:00.0": ["mlx5_4"],
            "0000:61:00.0": ["mlx5_5"],
            "0000:9d:00.0": ["mlx5_6"],
            "0000:c3:00.0": ["mlx5_9"],
            "0000:d1:00.0": ["mlx5_10"],
            "0000:df:00.0": ["mlx5_11"],
        }.items()
    )
    assert [topology.nics[nic].name for nic in topology.spare_nics] == ["mlx5_1", "mlx5_2", "mlx5_7"]
    assert topology.nics[8].name == "mlx5_8"
    assert not topology.nics[8].up
    assert [nic.netdevs for nic in topology.nics[:2]] == [("ibp24s0",), ("ibp41s0f0",)]


def test_dgx_with_one_compute_link_down_still_serves_each_gpu(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    card = next((tree.root / "sys/class/infiniband/mlx5_4/ports/1").glob("state"))
    card.write_text(DOWN + "\n")
    topology = read_topology(tree.root)
    groups = served(topology)
    assert ["mlx5_4"] not in groups.values()
    assert all(groups.values())
    assert groups["0000:1b:00.0"] == ["mlx5_0"]
    # the orphan has no NIC on its switch, so NICs of its NUMA node are no strangers any more
    assert groups["0000:52:00.0"] == ["mlx5_1"]


def test_flat_vm_shares_its_nics_fairly_without_numa(tmp_path: Path) -> None:
    topology = read_topology(flat_vm(tmp_path).root)
    assert {gpu.place.numa_node for gpu in topology.gpus} == {-1}
    assert set(topology.distances[0]) == {Distance.ROOT_COMPLEX}
    assert list(served(topology).values()) == [["mlx5_0"], ["mlx5_0"], ["mlx5_1"], ["mlx5_1"]]
    assert [group.cpus_are_near for group in topology.groups] == [False] * 4
    assert topology.groups[0].cpus == topology.allowed_cpus == tuple(range(32))
    assert len({group.worker_cpu for group in topology.groups}) == 4


def test_laptop_has_one_gpu_and_its_wireless(tmp_path: Path) -> None:
    topology = read_topology(laptop(tmp_path).root)
    assert [gpu.place.address for gpu in topology.gpus] == ["0000:01:00.0"]
    assert topology.gpus[0].place.numa_node == 0
    assert [(nic.name, nic.kind, nic.up) for nic in topology.nics] == [
        ("enp45s0", NicKind.ETHERNET, False),
        ("wlp0s20f3", NicKind.ETHERNET, True),
    ]
    assert served(topology) == {"0000:01:00.0": ["wlp0s20f3"]}


def test_domains_of_their_own_are_matched_by_numa_node_and_kinds_do_not_mix(tmp_path: Path) -> None:
    topology = read_topology(own_bridges_vm(tmp_path).root)
    assert topology.nics[0].name == "mana_0"
    assert list(served(topology).values()) == [["mlx5_ib0"], ["mlx5_ib1"], ["mlx5_ib2"], ["mlx5_ib3"]]
    assert [topology.nics[nic].name for nic in topology.spare_nics] == ["mana_0"]
    assert topology.distances[0][1] is Distance.NODE
    assert topology.distances[0][3] is Distance.FAR


def test_the_nics_of_a_gpu_that_fell_off_the_bus_stay_spare(tmp_path: Path) -> None:
    tree = p5en_48xlarge(tmp_path)
    for gpu in list((tree.root / "sys/devices").glob("pci*/*/*/*/*:43:00.0")):
        tree.write(str(gpu.relative_to(tree.root) / "vendor"), "0xffff")
    topology = read_topology(tree.root)
    assert len(topology.gpus) == 7
    assert any("0xffff" in note for note in topology.notes)
    assert Counter(len(group.nics) for group in topology.groups) == {2: 7}
    assert [topology.nics[nic].name for nic in topology.spare_nics] == ["rdmap68s0", "rdmap69s0", "ens5"]


def test_without_gpus_the_host_uses_all_nics_of_the_pool(tmp_path: Path) -> None:
    tree = p5en_48xlarge(tmp_path)
    for gpu in list((tree.root / "sys/devices").rglob("*:*[3]:00.0/device")):
        if gpu.read_text().strip() == "0x2335":
            tree.unplug(str(gpu.parent.relative_to(tree.root)))
    (host,) = read_topology(tree.root).groups
    assert (host.gpu, len(host.nics), host.numa_node) == (-1, 16, 0)


def test_cpuset_on_the_far_node_only_is_stated(tmp_path: Path) -> None:
    tree = p5en_48xlarge(tmp_path)
    tree.allow("48-79")
    topology = read_topology(tree.root)
    near = [group.cpus_are_near for group in topology.groups]
    assert near == [False] * 4 + [True] * 4
    assert all(set(group.cpus) == set(range(48, 80)) for group in topology.groups)
    assert len({group.worker_cpu for group in topology.groups}) == 8


def test_few_cores_are_not_given_away(tmp_path: Path) -> None:
    tree = p5en_48xlarge(tmp_path)
    tree.allow("0-7,96-103")
    assert {group.worker_cpu for group in read_topology(tree.root).groups} == {-1}


def test_siblings_are_one_core(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.cpus(8, threads=2)
    tree.node(0, "0-7", (10,))
    card = tree.pci("pci0000:00/0000:00:05.0", 0x15B3, 0x1021, 0x020700, driver="mlx5_core")
    tree.rdma("mlx5_0", card, NDR)
    for slot in (6, 7):
        tree.pci(f"pci0000:00/0000:00:{slot:02x}.0", NVIDIA, 0x2330, 0x030200)
    # 4 cores are not more than twice 2 groups
    assert [group.worker_cpu for group in read_topology(tmp_path).groups] == [-1, -1]
    tree.unplug("sys/devices/pci0000:00/0000:00:07.0")
    assert [group.worker_cpu for group in read_topology(tmp_path).groups] == [1]


def test_siblings_that_are_neighbours_are_one_core_too(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.cpus(10)
    for cpu in range(10):
        pair = f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}"
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", pair)
    tree.node(0, "0-9", (10,))
    for slot in (4, 5):
        tree.pci(f"pci0000:00/0000:00:{slot:02x}.0", NVIDIA, 0x2330, 0x030200)
    card = tree.pci("pci0000:00/0000:00:06.0", 0x15B3, 0x1021, 0x020700, driver="mlx5_core")
    tree.rdma("mlx5_0", card, NDR)
    assert [group.worker_cpu for group in read_topology(tmp_path).groups] == [2, 4]


def test_numa_minus_one_is_read_from_the_local_cpus(tmp_path: Path) -> None:
    tree = flat_vm(tmp_path)
    tree.write("sys/bus/pci/devices/0000:00:04.0/local_cpulist", "8-15,24-31")
    tree.write("sys/bus/pci/devices/0000:00:05.0/local_cpulist", "0-31")
    topology = read_topology(tree.root)
    assert [gpu.place.numa_node for gpu in topology.gpus] == [1, -1, -1, -1]


def test_a_node_that_does_not_exist_is_not_reported(tmp_path: Path) -> None:
    tree = flat_vm(tmp_path)
    tree.write("sys/bus/pci/devices/0000:00:04.0/numa_node", "7")
    topology = read_topology(tree.root)
    assert topology.gpus[0].place.numa_node == -1
    assert any("NUMA node 7" in note for note in topology.notes)


def test_virtual_functions_beside_their_physical_one_serve_nobody(tmp_path: Path) -> None:
    tree = laptop(tmp_path)
    physical = tree.pci("pci0000:00/0000:00:10.0", 0x15B3, 0x101D, 0x020000, driver="mlx5_core")
    tree.rdma("mlx5_0", physical, Port("Ethernet", "100 Gb/sec (4X EDR)"))
    virtual = tree.pci("pci0000:00/0000:00:10.2", 0x15B3, 0x101E, 0x020000, driver="mlx5_core")
    tree.rdma("mlx5_1", virtual, Port("Ethernet", "100 Gb/sec (4X EDR)"))
    tree.link(f"{virtual}/physfn", physical)
    topology = read_topology(tree.root)
    assert [nic.virtual_function for nic in topology.nics[:2]] == [False, True]
    assert served(topology) == {"0000:01:00.0": ["mlx5_0"]}


def test_soft_roce_sits_where_its_interface_does_and_yields_to_hardware(tmp_path: Path) -> None:
    tree = laptop(tmp_path)
    folder = tree.rdma("rxe0", "", Port("Ethernet", "2.5 Gb/sec (1X SDR)"))
    tree.write(f"{folder}/parent", "wlp0s20f3")
    topology = read_topology(tree.root)
    rxe = topology.nics[0]
    assert (rxe.software, rxe.kind, rxe.place.address, rxe.gbits_per_s) == (True, NicKind.ROCE, "0000:00:14.3", 2.5)
    assert served(topology) == {"0000:01:00.0": ["rxe0"]}
    card = tree.pci("pci0000:00/0000:00:10.0", 0x15B3, 0x101D, 0x020000, driver="mlx5_core")
    tree.rdma("mlx5_0", card, Port("Ethernet", "25 Gb/sec (1X EDR)"))
    assert served(read_topology(tree.root)) == {"0000:01:00.0": ["mlx5_0"]}


def test_unplugged_devices_and_odd_entries_do_no_harm(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    gone = (tree.root / "sys/bus/pci/devices/0000:1b:00.0").resolve().relative_to(tree.root.resolve())
    tree.unplug(str(gone))
    tree.write("sys/bus/pci/devices/garbage", "")
    tree.write("sys/class/infiniband/abi_version", "6")
    tree.write("sys/devices/system/node/has_cpu", "0-1")
    topology = read_topology(tree.root)
    assert len(topology.gpus) == 7
    assert len(topology.nodes) == 2
    assert all(group.nics for group in topology.groups)


def test_a_copy_without_links_is_matched_by_numa_node(tmp_path: Path) -> None:
    for index, bus in enumerate((0x1B, 0x9D)):
        folder = f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
        MachineTree(tmp_path).write(f"{folder}/vendor", "0x10de")
        MachineTree(tmp_path).write(f"{folder}/class", "0x030200")
        MachineTree(tmp_path).write(f"{folder}/numa_node", str(index))
        card = f"sys/class/infiniband/mlx5_{1 - index}"
        MachineTree(tmp_path).write(f"{card}/device/uevent", f"DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:{bus + 1:02x}:00.0")
        MachineTree(tmp_path).write(f"{card}/ports/1/state", "4: ACTIVE")
        MachineTree(tmp_path).write(f"{card}/ports/1/link_layer", "InfiniBand")
        MachineTree(tmp_path).write(f"sys/bus/pci/devices/0000:{bus + 1:02x}:00.0/numa_node", str(index))
        MachineTree(tmp_path).node(index, f"{index}", (10, 21) if index == 0 else (21, 10))
    topology = read_topology(tmp_path)
    assert served(topology) == {"0000:1b:00.0": ["mlx5_1"], "0000:9d:00.0": ["mlx5_0"]}


def test_host_buffers_prefer_the_nics_of_their_node(tmp_path: Path) -> None:
    topology = read_topology(dgx_h100(tmp_path).root)
    for node in topology.nodes:
        nearest = [topology.nics[nic].place.numa_node for nic in node.nics]
        assert nearest == sorted(nearest, key=lambda other: other != node.id)


@pytest.mark.parametrize("name", MACHINES)
def test_reading_twice_states_the_same(name: str, tmp_path: Path) -> None:
    tree = MACHINES[name](tmp_path)
    assert read_topology(tree.root) == read_topology(str(tree.root) + "/")
