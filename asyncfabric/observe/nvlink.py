"""NVLinks: how many of them a GPU has, how many are up, and how many lead to each other GPU. Asked of libnvidia-ml.

`read_nvlinks` opens the library that came with the driver and creates no context on a GPU; milliseconds. What the
library reports can be kept as JSON in a folder beside a copied sys and proc, and is read from there. Any thread.
Nothing here changes anything.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAVED_AS = "nvlinks.json"
"""Name of the file in a saved tree."""

LIBRARY = "libnvidia-ml.so.1"
MOST_LINKS = 32
_P2P_NVLINK = 2
_TO_GPU, _TO_SWITCH = 0, 2


@dataclass(frozen=True, slots=True)
class NvGpu:
    """One GPU. `address`: as in `Gpu.place.address`. `links`: how many it has. `up`: how many of them work."""

    address: str
    links: int
    up: int
    switched: bool


@dataclass(frozen=True, slots=True)
class NvLinks:
    """GPUs in the order of their PCI addresses; `between[i][j]`: links from GPU i to GPU j, also by switches."""

    gpus: tuple[NvGpu, ...]
    between: tuple[tuple[int, ...], ...]


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


def read_nvlinks(root: str | os.PathLike[str] = "/") -> NvLinks:
    """Return the NVLinks of this machine, or of the one whose saved tree is `root`; no GPUs where nobody can know."""
    return links_of(raw_links(root))


def raw_links(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return what the driver's library states of each GPU, or what a saved tree has of its answer; JSON values."""
    if Path(root) == Path("/"):
        return _ask()
    try:
        stated = json.loads((Path(root) / SAVED_AS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return stated if isinstance(stated, list) else []


def links_of(stated: Sequence[Any]) -> NvLinks:
    """Return the view of what was reported; a GPU that makes no sense is left out."""
    known = sorted(
        (one for one in stated if isinstance(one, Mapping) and isinstance(one.get("address"), str)),
        key=lambda one: str(one["address"]),
    )
    gpus = []
    for one in known:
        up = [link for link in _links(one) if link.get("up") is True]
        switched = any(link.get("to") == "switch" for link in up)
        gpus.append(NvGpu(one["address"], len(_links(one)), len(up), switched))
    between = tuple(
        tuple(_count(one, gpu, other, peer) for other, peer in zip(known, gpus, strict=True))
        for one, gpu in zip(known, gpus, strict=True)
    )
    return NvLinks(tuple(gpus), between)


def _links(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    links = one.get("links")
    return [link for link in links if isinstance(link, Mapping)] if isinstance(links, list) else []


def _count(one: Mapping[str, Any], gpu: NvGpu, other: Mapping[str, Any], peer: NvGpu) -> int:
    if gpu.address == peer.address:
        return 0
    if gpu.switched and peer.switched:  # a switch leads everywhere, unless the driver reports that it does not
        peers = one.get("peers")
        return min(gpu.up, peer.up) if isinstance(peers, list) and peer.address in peers else 0
    return sum(1 for link in _links(one) if link.get("up") is True and link.get("to") == other["address"])


def _ask() -> list[dict[str, Any]]:
    """Ask NVML; an empty list where it is not there, or will not start."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    try:
        return _ask_each(nvml)
    except AttributeError:  # a library older than NVLink
        return []
    finally:
        nvml.nvmlShutdown()


def _ask_each(nvml: Any) -> list[dict[str, Any]]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    devices: list[tuple[str, Any]] = []
    for index in range(count.value):
        device, pci = ctypes.c_void_p(), _Pci()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        if nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci)) == 0:
            devices.append((_address(pci), device))
    stated = []
    for address, device in devices:
        peers = []
        for other, peer in devices:
            status = ctypes.c_int(-1)
            if other != address and nvml.nvmlDeviceGetP2PStatus(device, peer, _P2P_NVLINK, ctypes.byref(status)) == 0:
                peers += [other] if status.value == 0 else []
        stated.append({"address": address, "links": _links_of_device(nvml, device), "peers": peers})
    return stated


def _links_of_device(nvml: Any, device: Any) -> list[dict[str, Any]]:
    links = []
    for number in range(MOST_LINKS):
        state, kind, pci = ctypes.c_uint(), ctypes.c_uint(255), _Pci()
        if nvml.nvmlDeviceGetNvLinkState(device, number, ctypes.byref(state)) != 0:
            break  # the numbers end here, or there are none
        link: dict[str, Any] = {"up": state.value == 1, "to": ""}
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, number, ctypes.byref(kind)) == 0:
            if kind.value == _TO_SWITCH:
                link["to"] = "switch"
            elif kind.value == _TO_GPU and not nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(
                device, number, ctypes.byref(pci)
            ):
                link["to"] = _address(pci)
        links.append(link)
    return links


def _address(pci: _Pci) -> str:
    """Return the address as sysfs writes it: NVML's domain has eight digits."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
