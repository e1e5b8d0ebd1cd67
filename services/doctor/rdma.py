"""RDMA devices as sysfs shows them: present, ports active, addresses that peers can reach, and MTU. Opens nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from asyncfabric.observe.topology import Nic, NicKind, read_topology
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict, absent
from asyncfabric_services.doctor.proc_text import read_number, read_text

NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = ("fe8", "fe9", "fea", "feb")
MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"
GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
NETDEV = re.compile(r"[\w.@:-]{1,15}", re.ASCII)
ROOMY_MTU = 4200  # 4096 bytes of payload and the headers of RoCE v2
MOST_GIDS = 256


@dataclass(frozen=True)
class Gid:
    """One address of a port; `kind` as sysfs writes it: "IB/RoCE v1" or "RoCE v2".

    `up`, `vlan`: of its interface; up where its state is unknown.
    """

    index: int
    address: str
    kind: str
    netdev: str
    up: bool = True
    vlan: bool = False


@dataclass(frozen=True)
class RdmaPort:
    """One port. `mtu`: of its interface in bytes, None when unknown."""

    device: str
    number: int
    kind: NicKind
    active: bool
    gids: tuple[Gid, ...]
    mtu: int | None

    @property
    def name(self) -> str:
        """Device and port as people write them."""
        return f"{self.device}:{self.number}"


@dataclass(frozen=True)
class RdmaFacts:
    """All ports of all devices; `adapters`: PCI devices of known RDMA makers, of which some may have no RDMA device."""

    ports: tuple[RdmaPort, ...]
    adapters: tuple[str, ...] = ()


def read_rdma(root: Path) -> RdmaFacts:
    """Read every port's files."""
    nics = {nic.name: nic for nic in read_topology(root).nics if nic.kind is not NicKind.ETHERNET}
    ports = tuple(port for nic in nics.values() for port in _ports(root, nic))
    claimed = {nic.place.address for nic in nics.values()}
    return RdmaFacts(ports, tuple(address for address in _adapters(root) if address not in claimed))


def check_rdma(facts: RdmaFacts, asked: Asked) -> list[Finding]:
    """State what is here, what is up, and how it is addressed."""
    devices = _devices(facts, asked)
    if not facts.ports:
        return [devices]
    roce = [port for port in facts.ports if port.kind is NicKind.ROCE and port.active]
    return [devices, _active(facts), *([_gids(roce), _mtu(roce)] if roce else [])]


def _devices(facts: RdmaFacts, asked: Asked) -> Finding:
    name = "RDMA devices"
    if facts.adapters:
        found = f"no RDMA device for {', '.join(facts.adapters)}"
        fix = "load the driver: modprobe mlx5_ib (or efa, irdma, bnxt_re); in a container, pass /dev/infiniband in"
        return Finding(name, Verdict.FAIL if asked & {"verbs", "efa"} else Verdict.WARN, found, fix)
    if not facts.ports:
        fix = "such hardware, or other rails: local and tcp connect processes and hosts without it"
        return absent(name, "none", fix, asked, "verbs", "efa")
    kinds = {port.device: port.kind for port in facts.ports}
    carriers = {"verbs": {NicKind.INFINIBAND, NicKind.ROCE}, "efa": {NicKind.EFA}}
    found = ", ".join(f"{device} ({kind.name.lower()})" for device, kind in kinds.items())
    lacking = sorted(provider for provider in asked & {"verbs", "efa"} if not carriers[provider] & set(kinds.values()))
    if lacking:
        return Finding(
            name, Verdict.FAIL, found, f"none of them can carry {' or '.join(lacking)}: iWARP has no immediates"
        )
    return Finding(name, Verdict.OK, found)


def _active(facts: RdmaFacts) -> Finding:
    down = [port.name for port in facts.ports if not port.active]
    count = len(facts.ports)
    fix = "check cable, switch port and subnet manager; ip link set <interface> up"
    if len(down) == count:
        return Finding("RDMA ports", Verdict.FAIL, f"all {count} are down: {', '.join(down)}", fix)
    if down:
        return Finding(
            "RDMA ports", Verdict.WARN, f"{count - len(down)} of {count} active; down: {', '.join(down)}", fix
        )
    return Finding("RDMA ports", Verdict.OK, f"{count} of {count} active")


def _gids(ports: list[RdmaPort]) -> Finding:
    name = "RoCE GIDs"
    empty = [port.name for port in ports if not port.gids]
    if empty:
        fix = "nobody can reach the port: give its interface an IP address, and ip link set <interface> up"
        return Finding(name, Verdict.FAIL, f"no address at all on {', '.join(empty)}", fix)
    without = [port.name for port in ports if not _roce_v2(port)]
    if without:
        fix = "v1 stays in one Ethernet segment: turn v2 on with cma_roce_mode -m 2, or take a newer driver"
        return Finding(name, Verdict.WARN, f"no RoCE v2 address on {', '.join(without)}", fix)
    no_ipv4 = [port.name for port in ports if not any(gid.address.startswith(MAPPED_IPV4) for gid in _roce_v2(port))]
    if no_ipv4:
        found = f"no IPv4 address behind RoCE v2 on {', '.join(no_ipv4)}"
        return Finding(name, Verdict.WARN, found, "give the interface an IPv4 address; link-local IPv6 is not routed")
    down = [f"{port.name} ({_best(port).netdev})" for port in ports if not _best(port).up]
    if down:
        fix = "ip link set <interface> up, or name another address: verbs:<device>?gid=<index, address or interface>"
        return Finding(name, Verdict.WARN, f"the interface is down behind {', '.join(down)}", fix)
    chosen = "; ".join(f"{port.name} {_text(_best(port))}{_others(port)}" for port in ports)
    return Finding(name, Verdict.OK, f"RoCE v2 over IPv4: {chosen}")


def _mtu(ports: list[RdmaPort]) -> Finding:
    small = [f"{port.name} ({port.mtu})" for port in ports if port.mtu is not None and port.mtu < ROOMY_MTU]
    if small:
        fix = "4096-byte packets need an MTU of 4200 or more, on the switches too: ip link set <interface> mtu 9000"
        return Finding("RoCE MTU", Verdict.WARN, f"small on {', '.join(small)}", fix)
    return Finding("RoCE MTU", Verdict.OK, ", ".join(f"{port.name} {port.mtu or 'unknown'}" for port in ports))


def _roce_v2(port: RdmaPort) -> list[Gid]:
    return [gid for gid in port.gids if gid.kind == "RoCE v2"]


def _best(port: RdmaPort) -> Gid:
    """Return what the rail chooses (native/src/providers/verbs/device/port.h has the rule)."""

    def worth(gid: Gid) -> tuple[bool, bool, int, bool, int]:
        link_local = gid.address.startswith(LINK_LOCAL)
        family = 2 if gid.address.startswith(MAPPED_IPV4) else 0 if link_local else 1
        return gid.up, gid.kind == "RoCE v2", family, not gid.vlan, -gid.index

    return max(port.gids, key=worth)


def _text(gid: Gid) -> str:
    address = _ipv4(gid.address) if gid.address.startswith(MAPPED_IPV4) else gid.address
    on = f" on {gid.netdev}" if gid.netdev else ""
    return f"index {gid.index} ({address}{on}{', a VLAN' if gid.vlan else ''})"


def _others(port: RdmaPort) -> str:
    """Name the other IPv4 addresses, which the option gid= takes."""
    others = [gid for gid in _roce_v2(port) if gid.address.startswith(MAPPED_IPV4) and gid != _best(port)]
    return f", before {', '.join(map(_text, others))}" if others else ""


def _ipv4(address: str) -> str:
    high, low = (int(part, 16) for part in address.split(":")[6:8])
    return f"{high >> 8}.{high & 255}.{low >> 8}.{low & 255}"


def _ports(root: Path, nic: Nic) -> list[RdmaPort]:
    folder = root / "sys/class/infiniband" / nic.name / "ports"
    numbers = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
    return [_port(root, nic, number) for number in numbers]


def _port(root: Path, nic: Nic, number: int) -> RdmaPort:
    folder = f"sys/class/infiniband/{nic.name}/ports/{number}"
    gids = []
    indices = sorted(int(path.name) for path in (root / folder / "gids").glob("*") if path.name.isdigit())
    for index in indices[:MOST_GIDS]:
        address = read_text(root, f"{folder}/gids/{index}")
        if address is None or address == NO_GID or not GID.fullmatch(address):
            continue
        kind = read_text(root, f"{folder}/gid_attrs/types/{index}") or ""
        netdev = read_text(root, f"{folder}/gid_attrs/ndevs/{index}") or ""
        netdev = netdev if NETDEV.fullmatch(netdev) else ""
        gids.append(Gid(index, address, kind, netdev, *_interface(root, netdev)))
    interface = next((gid.netdev for gid in gids if gid.netdev), nic.netdevs[0] if nic.netdevs else "")
    mtu = read_number(root, f"sys/class/net/{interface}/mtu") if interface else None
    active = (read_text(root, f"{folder}/state") or "").startswith("4")
    return RdmaPort(nic.name, number, nic.kind, active, tuple(gids), mtu)


def _interface(root: Path, name: str) -> tuple[bool, bool]:
    """Return whether an interface is up, and whether it is one of a VLAN."""
    folder = f"sys/class/net/{name}"
    if not name:
        return True, False
    uevent = (read_text(root, f"{folder}/uevent") or "").splitlines()
    return (read_text(root, f"{folder}/operstate") or "up") in {"up", "unknown"}, "DEVTYPE=vlan" in uevent


def _adapters(root: Path) -> list[str]:
    """Return PCI network adapters that are made for RDMA: Mellanox/NVIDIA from ConnectX-3 on, and EFA."""
    found = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, device = read_number(path, "vendor"), read_number(path, "device")
        is_network = (read_number(path, "class") or 0) >> 16 == 0x02
        is_efa = vendor == 0x1D0F and device is not None and device & 0xFFF0 == 0xEFA0
        if is_network and (vendor == 0x15B3 or is_efa):
            found.append(path.name)
    return found
