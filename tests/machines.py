"""Machines as trees, from public facts: vendors' manuals, lspci and `nvidia-smi topo -m` listings in public reports.

What is not published is made up in a plausible way: bus numbers of p5en islands, NUMA numbers of virtual machines.
"""

from __future__ import annotations

from pathlib import Path

from machine_tree import ACTIVE, DOWN, UNSPECIFIED, MachineTree, Port

NVIDIA, MELLANOX, AMAZON, INTEL = 0x10DE, 0x15B3, 0x1D0F, 0x8086
H100, H200, A100 = 0x2330, 0x2335, 0x20B0
GPU_3D, VGA, ETHERNET, INFINIBAND, NVME, NVSWITCH = 0x030200, 0x030000, 0x020000, 0x020700, 0x010802, 0x068000
NDR = Port("InfiniBand", "400 Gb/sec (4X NDR)")
EFA_PORT = Port("Unknown", "200 Gb/sec (4X HDR)", gids=(("fe80:0000:0000:0000:0813:3dff:fe11:2201", "IB/RoCE v1", ""),))
ROCE_GIDS = (
    ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "IB/RoCE v1", "eth1"),
    ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2", "eth1"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0005", "IB/RoCE v1", "eth1"),
    ("0000:0000:0000:0000:0000:ffff:0a00:0005", "RoCE v2", "eth1"),
)


def p5en_48xlarge(root: Path) -> MachineTree:
    """8 H200 and 16 EFA NICs of 200 Gb/s in 8 islands behind a PCIe switch each, 2 sockets, 192 vCPUs, an ENA."""
    tree = MachineTree(root)
    tree.cpus(192, threads=2)
    tree.node(0, "0-47,96-143", (10, 21), 1024)
    tree.node(1, "48-95,144-191", (21, 10), 1024)
    tree.pci("pci0000:00/0000:00:03.0", AMAZON, 0x1111, VGA, node=0)
    ena = tree.pci("pci0000:00/0000:00:05.0", AMAZON, 0xEC20, ETHERNET, node=0, driver="ena")
    tree.netdev("ens5", ena, mbits=-1)
    for island in range(8):
        bus = 0x40 + 0x10 * island
        node = island // 4
        port = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0"
        tree.bridge(port, node, vendor=INTEL, device=0x352A)
        tree.bridge(f"{port}/0000:{bus + 1:02x}:00.0", node)
        switch = f"{port}/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}"
        for slot, kind in enumerate(("gpu", "efa", "efa", "nvme")):
            tree.bridge(f"{switch}:{slot:02x}.0", node)
            at = f"{switch}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0"
            if kind == "gpu":
                tree.pci(at, NVIDIA, H200, GPU_3D, node=node, driver="nvidia")
            elif kind == "nvme":
                tree.pci(at, AMAZON, 0xCD01, NVME, node=node, driver="nvme")
            else:
                efa = tree.pci(at, AMAZON, 0xEFA2, ETHERNET, node=node, driver="efa")
                tree.rdma(f"rdmap{bus + 3 + slot}s0", efa, EFA_PORT, node_type=UNSPECIFIED)
    return tree


DGX_GPUS = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
DGX_NICS = {
    0x18: 0,
    0x40: 3,
    0x4F: 4,
    0x5E: 5,
    0x9A: 6,
    0xC0: 9,
    0xCE: 10,
    0xDC: 11,
}  # bus -> mlx5 number, beside its GPU
DGX_STORAGE = {0x29: (1, 2), 0xAA: (7, 8)}  # dual-port cards: the first port InfiniBand, the second Ethernet


def dgx_h100(root: Path) -> MachineTree:
    """8 H100, 8 ConnectX-7 for compute behind the GPUs' switches, 2 dual-port ConnectX-7 for storage, 2 sockets."""
    tree = MachineTree(root)
    tree.cpus(224, threads=2)
    tree.node(0, "0-55,112-167", (10, 21), 1024)
    tree.node(1, "56-111,168-223", (21, 10), 1024)
    display = tree.bridge("pci0000:00/0000:00:1c.5", 0)
    tree.pci(f"{display.removeprefix('sys/devices/')}/0000:02:00.0", 0x1A03, 0x2000, VGA, node=0, driver="ast")
    for index, (gpu, (nic, number)) in enumerate(zip(DGX_GPUS, DGX_NICS.items(), strict=True)):
        node = index // 4
        root_bus = nic - 3
        port = f"pci0000:{root_bus:02x}/0000:{root_bus:02x}:01.0"
        tree.bridge(port, node, vendor=INTEL, device=0x352A)
        upstream = f"{port}/0000:{nic - 2:02x}:00.0"
        tree.bridge(upstream, node)
        tree.bridge(f"{upstream}/0000:{nic - 1:02x}:00.0", node)
        card = tree.pci(
            f"{upstream}/0000:{nic - 1:02x}:00.0/0000:{nic:02x}:00.0",
            MELLANOX,
            0x1021,
            INFINIBAND,
            node=node,
            driver="mlx5_core",
        )
        tree.rdma(f"mlx5_{number}", card, NDR, netdevs=(f"ibp{nic}s0",))
        tree.bridge(f"{upstream}/0000:{nic - 1:02x}:01.0", node)
        tree.bridge(f"{upstream}/0000:{nic - 1:02x}:01.0/0000:{gpu - 2:02x}:00.0", node)  # a second switch on the way
        tree.bridge(f"{upstream}/0000:{nic - 1:02x}:01.0/0000:{gpu - 2:02x}:00.0/0000:{gpu - 1:02x}:00.0", node)
        tree.pci(
            f"{upstream}/0000:{nic - 1:02x}:01.0/0000:{gpu - 2:02x}:00.0/0000:{gpu - 1:02x}:00.0/0000:{gpu:02x}:00.0",
            NVIDIA,
            H100,
            GPU_3D,
            node=node,
            driver="nvidia",
        )
    for index, (bus, (infiniband, ethernet)) in enumerate(DGX_STORAGE.items()):
        port = f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0"
        tree.bridge(port, index, vendor=INTEL, device=0x352A)
        first = tree.pci(f"{port}/0000:{bus:02x}:00.0", MELLANOX, 0x1021, INFINIBAND, node=index, driver="mlx5_core")
        tree.rdma(f"mlx5_{infiniband}", first, NDR, netdevs=(f"ibp{bus}s0f0",))
        second = tree.pci(f"{port}/0000:{bus:02x}:00.1", MELLANOX, 0x1021, ETHERNET, node=index, driver="mlx5_core")
        roce = Port("Ethernet", "400 Gb/sec (4X NDR)", ACTIVE if index == 0 else DOWN)
        tree.rdma(f"mlx5_{ethernet}", second, roce, netdevs=(f"enp{bus}s0f1np1",))
    for number in range(4):
        tree.pci(f"pci0000:00/0000:00:1d.{number}", NVIDIA, 0x22A3, NVSWITCH, node=0)
    return tree


def flat_vm(root: Path) -> MachineTree:
    """A virtual machine with all devices on one host bridge: 4 GPUs, 2 ConnectX functions, 2 nodes, NUMA unknown."""
    tree = MachineTree(root)
    tree.cpus(32, threads=2)
    tree.node(0, "0-7,16-23", (10, 20), 128)
    tree.node(1, "8-15,24-31", (20, 10), 128)
    tree.pci("pci0000:00/0000:00:02.0", 0x1AF4, 0x1050, 0x038000)
    for slot in range(4):
        tree.pci(f"pci0000:00/0000:00:{4 + slot:02x}.0", NVIDIA, A100, GPU_3D, driver="nvidia")
    for number in range(2):
        card = tree.pci(f"pci0000:00/0000:00:{10 + number:02x}.0", MELLANOX, 0x101E, ETHERNET, driver="mlx5_core")
        tree.rdma(
            f"mlx5_{number}",
            card,
            Port("Ethernet", "100 Gb/sec (4X EDR)", gids=ROCE_GIDS),
            netdevs=(f"eth{1 + number}",),
        )
    virtio = tree.pci("pci0000:00/0000:00:03.0", 0x1AF4, 0x1041, ETHERNET, driver="virtio-pci")
    tree.netdev("eth0", f"{virtio}/virtio0", mbits=-1)
    return tree


def laptop(root: Path) -> MachineTree:
    """One NVIDIA GPU behind a root port, integrated graphics, wireless that is up, wired that is not; no RDMA."""
    tree = MachineTree(root)
    tree.cpus(16, threads=2)
    tree.node(0, "0-15", (10,), 32)
    tree.pci("pci0000:00/0000:00:02.0", INTEL, 0x46A6, VGA, driver="i915")
    tree.bridge("pci0000:00/0000:00:01.0", vendor=INTEL, device=0x460D)
    tree.pci("pci0000:00/0000:00:01.0/0000:01:00.0", NVIDIA, 0x25A2, VGA, driver="nvidia")
    wireless = tree.pci("pci0000:00/0000:00:14.3", INTEL, 0x51F0, 0x028000, driver="iwlwifi")
    tree.netdev("wlp0s20f3", wireless, mbits=-1)
    tree.bridge("pci0000:00/0000:00:1d.0", vendor=INTEL, device=0x51B0)
    wired = tree.pci("pci0000:00/0000:00:1d.0/0000:2d:00.0", 0x10EC, 0x8168, ETHERNET, driver="r8169")
    tree.netdev("enp45s0", wired, state="down", mbits=-1)
    tree.netdev("lo", "", state="unknown")
    return tree


def own_bridges_vm(root: Path) -> MachineTree:
    """A virtual machine that gives each device a PCI domain of its own: 4 GPUs, 4 InfiniBand, one RDMA Ethernet."""
    tree = MachineTree(root)
    tree.cpus(48)
    tree.node(0, "0-23", (10, 21))
    tree.node(1, "24-47", (21, 10))
    bus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00"
    for index in range(4):
        node = index // 2
        tree.pci(
            f"{bus}/gpu-{index}/pci{index + 1:04x}:00/{index + 1:04x}:00:00.0",
            NVIDIA,
            H100,
            GPU_3D,
            node=node,
            driver="nvidia",
        )
        card = tree.pci(
            f"{bus}/nic-{index}/pci{index + 0x101:04x}:00/{index + 0x101:04x}:00:00.0",
            MELLANOX,
            0x101E,
            INFINIBAND,
            node=node,
            driver="mlx5_core",
        )
        tree.rdma(f"mlx5_ib{index}", card, NDR, netdevs=(f"ib{index}",))
    mana = tree.pci(f"{bus}/mana/pci7870:00/7870:00:00.0", 0x1414, 0x00BA, ETHERNET, node=0, driver="mana")
    tree.rdma("mana_0", mana, Port("Ethernet", "100 Gb/sec (4X EDR)"), netdevs=("enP30832s1",))
    return tree


MACHINES = {
    "p5en.48xlarge": p5en_48xlarge,
    "DGX H100": dgx_h100,
    "flat-PCI VM": flat_vm,
    "laptop": laptop,
    "VM with a domain per device": own_bridges_vm,
}
