"""PCI Express by configuration space: ACS on the bridges between GPUs and their NICs, relaxed ordering on NICs.

Layouts: PCI Express Base Specification, chapters on the PCI Express Capability (id 0x10) and on Access Control Services
(extended capability 0x000d). Without root only the first 64 bytes can be read, which is reported, never guessed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncfabric.observe.topology import NicKind, Topology, read_topology
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict

STATUS_HAS_LIST = 0x10
EXPRESS, ACS = 0x10, 0x000D
RELAXED_ORDERING = 1 << 4
REDIRECTS = 1 << 2 | 1 << 3 | 1 << 5  # peer-to-peer request redirect, completion redirect, egress control
READABLE_BY_ALL, LEGACY, EXTENDED = 64, 256, 4096


@dataclass(frozen=True)
class PcieFacts:
    """Address -> what is set; None where configuration space cannot be read.

    `redirects`: of the bridges between GPUs and their NICs; a bridge without ACS is False. `relaxed`: of RDMA NICs.
    """

    redirects: Mapping[str, bool | None]
    relaxed: Mapping[str, bool | None]


def read_pcie(root: Path) -> PcieFacts:
    """Read the configuration spaces that matter."""
    topology = read_topology(root)
    bridges = sorted(set(_bridges(topology)))
    nics = sorted(
        {nic.place.address for nic in topology.nics if nic.kind is not NicKind.ETHERNET and nic.place.address}
    )
    return PcieFacts(
        redirects={address: redirects_peers(_config(root, address)) for address in bridges},
        relaxed={address: relaxed_ordering(_config(root, address)) for address in nics},
    )


def check_pcie(facts: PcieFacts, asked: Asked) -> list[Finding]:
    """State whether GPU and NIC may talk through the switch, and whether writes may overtake."""
    return [_acs(facts.redirects), _ordering(facts.relaxed)]


def _acs(redirects: Mapping[str, bool | None]) -> Finding:
    name = "PCIe ACS"
    if not redirects:
        return Finding(
            name, Verdict.ABSENT, "no bridge between a GPU and its NIC", "nothing to do: it matters for GPU memory only"
        )
    on = [address for address, value in redirects.items() if value]
    unread = [address for address, value in redirects.items() if value is None]
    if on:
        fix = "GPU traffic makes a detour over the CPU: turn ACS off in the BIOS, or setpci -s <bridge> ECAP_ACS+6.w=0"
        return Finding(name, Verdict.WARN, f"redirects peer-to-peer on {', '.join(on)}", fix)
    if unread:
        return Finding(
            name, Verdict.WARN, f"cannot read {len(unread)} of {len(redirects)} bridges", "run it as root to know"
        )
    return Finding(name, Verdict.OK, f"off on {len(redirects)} bridges between GPUs and NICs")


def _ordering(relaxed: Mapping[str, bool | None]) -> Finding:
    name = "relaxed ordering"
    if not relaxed:
        return Finding(name, Verdict.ABSENT, "no RDMA NIC on PCI", "nothing to do: it matters for RDMA NICs only")
    off = [address for address, value in relaxed.items() if value is False]
    unread = [address for address, value in relaxed.items() if value is None]
    if off:
        fix = "fast NICs miss line rate without: setpci -s <nic> CAP_EXP+8.w=10:10, or allow it in the BIOS"
        return Finding(name, Verdict.WARN, f"off on {', '.join(off)}", fix)
    if unread:
        return Finding(
            name, Verdict.WARN, f"cannot read {len(unread)} of {len(relaxed)} NICs", "run it as root to know"
        )
    return Finding(name, Verdict.OK, f"on for {len(relaxed)} NICs")


def _bridges(topology: Topology) -> Iterator[str]:
    """Yield the bridges on the way from each GPU to its NICs: those of one path alone, and where the paths meet."""
    for group in topology.groups:
        if group.gpu < 0:
            continue
        here = topology.gpus[group.gpu].place.path
        for nic in group.nics:
            there = topology.nics[nic].place.path
            shared = sum(1 for one, other in zip(here, there, strict=False) if one == other)
            if shared == 0:
                continue  # different host bridges: the traffic goes through the root complex anyhow
            way = [*here[shared:-1], *there[shared:-1], here[shared - 1]]
            yield from (step for step in way if not step.startswith("pci"))


def _config(root: Path, address: str) -> bytes:
    try:
        with (root / "sys/bus/pci/devices" / address / "config").open("rb") as file:
            return file.read(EXTENDED)
    except OSError:
        return b""


def relaxed_ordering(config: bytes) -> bool | None:
    """Return the Enable Relaxed Ordering bit of Device Control; None when it cannot be read."""
    if len(config) < LEGACY:
        return None
    at = _capability(config, EXPRESS)
    return None if at is None else bool(struct.unpack_from("<H", config, at + 8)[0] & RELAXED_ORDERING)


def redirects_peers(config: bytes) -> bool | None:
    """State whether ACS Control redirects peer-to-peer traffic; False without ACS, None when it cannot be read."""
    if len(config) < EXTENDED:
        return None
    at: int = 0x100
    for _ in range(EXTENDED // 8):  # a broken list must not loop
        if at < 0x100 or at + 8 > len(config):
            return False
        header = struct.unpack_from("<I", config, at)[0]
        if header & 0xFFFF == ACS:
            return bool(struct.unpack_from("<H", config, at + 6)[0] & REDIRECTS)
        at = header >> 20
    return False


def _capability(config: bytes, wanted: int) -> int | None:
    if not config[0x06] & STATUS_HAS_LIST:
        return None
    at = config[0x34] & 0xFC
    for _ in range(LEGACY // 4):
        if at < READABLE_BY_ALL or at + 12 > LEGACY:
            return None
        if config[at] == wanted:
            return at
        at = config[at + 1] & 0xFC
    return None
