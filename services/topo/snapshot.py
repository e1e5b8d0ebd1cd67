"""Copies the files that a topology is read from, links kept, so that another machine can be looked at elsewhere.

What identifies people or machines stays behind: no serial numbers, no MAC or network addresses, no host name. Blocking.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from asyncfabric.observe.nvlink import SAVED_AS, raw_links

PCI_FILES = ("vendor", "device", "class", "numa_node", "local_cpulist")
NODE_FILES = ("cpulist", "distance")
RDMA_FILES = ("node_type", "parent")
PORT_FILES = ("state", "rate", "link_layer", "gid_attrs/ndevs/0")
NET_FILES = ("operstate", "speed")
MOST_BYTES = 64 * 1024


def save_tree(root: Path, target: Path) -> int:
    """Copy into `target`, which must not exist; return the number of files and links."""
    target.mkdir(parents=True)
    count = 0
    for path in sorted(set(_paths(root))):
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        source = root / path
        if source.is_symlink():
            place.symlink_to(os.readlink(source))
        else:
            text = _read(source)
            if text is None:
                continue
            place.write_text(text)
        count += 1
    if stated := raw_links(root):
        (target / SAVED_AS).write_text(json.dumps(stated, indent=1))
        count += 1
    return count


def _read(path: Path) -> str | None:
    """Return what a topology needs of a file, None when it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_BYTES)
    except OSError:  # attributes of links that are down refuse to be read
        return None
    if path.name == "meminfo":
        return "\n".join(line for line in text.splitlines() if "MemTotal:" in line)
    if path.name == "status":
        return "\n".join(line for line in text.splitlines() if line.startswith("Cpus_allowed_list:"))
    if path.name == "information":
        return "\n".join(line for line in text.splitlines() if line.startswith("Model:"))
    return text


def _paths(root: Path) -> Iterator[Path]:
    """Yield files and links, relative to the root."""
    yield from _existing(root, "proc/self/status", "sys/devices/system/cpu/online")
    yield from _globbed(root, "sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list")
    for name in (*NODE_FILES, "meminfo"):
        yield from _globbed(root, f"sys/devices/system/node/node[0-9]*/{name}")
    yield from _globbed(root, "proc/driver/nvidia/gpus/*/information")
    yield from _linked(root, "sys/bus/pci/devices/*", (*PCI_FILES, "driver", "physfn"))
    ports = [f"ports/{port.name}/{name}" for port in _ports(root) for name in PORT_FILES]
    yield from _linked(root, "sys/class/infiniband/*", (*RDMA_FILES, "device", *ports))
    yield from _linked(root, "sys/class/net/*", (*NET_FILES, "device"))


def _ports(root: Path) -> list[Path]:
    return list({path.name: path for path in root.glob("sys/class/infiniband/*/ports/*")}.values())


def _existing(root: Path, *names: str) -> Iterator[Path]:
    for name in names:
        if os.path.lexists(root / name):
            yield Path(name)


def _globbed(root: Path, pattern: str) -> Iterator[Path]:
    for path in root.glob(pattern):
        yield path.relative_to(root)


def _linked(root: Path, pattern: str, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield a class's links, and the named files and links of the folders where they lead."""
    for link in root.glob(pattern):
        yield link.relative_to(root)
        folder = link.resolve()
        if not folder.is_relative_to(root.resolve()):
            continue
        inside = folder.relative_to(root.resolve())
        for name in names:
            yield from _existing(root, str(inside / name))
