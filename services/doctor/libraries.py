"""The network libraries: opened as our providers open them, in a child, and the file that the loader really took.

A child, because libraries leave threads and signal handlers behind, and a broken one may take its process with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncfabric_services.doctor.child import ask_child
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict, absent

OLDEST_LIBFABRIC = (1, 17)
PROGRAM = "asyncfabric_services.doctor.library_trial"
NEEDED_BY = {"libfabric.so.1": ("tcp", "efa"), "libibverbs.so.1": ("verbs",), "libcuda.so.1": ("cuda",)}
FIXES = {
    "libfabric.so.1": "for the tcp and efa rails: apt-get install libfabric1, or AWS's EFA installer",
    "libibverbs.so.1": "for ConnectX and RoCE: apt-get install libibverbs1 ibverbs-providers",
    "libcuda.so.1": "for GPU memory: install the NVIDIA driver; in a container, run it with the NVIDIA runtime",
}


@dataclass(frozen=True)
class Library:
    """One library. `file`: what was loaded, "" when `error` states why not. `others`: further files of that name."""

    name: str
    file: str
    version: str
    error: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class LibraryFacts:
    """`devices`: for each library, what is here that needs it."""

    libraries: tuple[Library, ...]
    devices: Mapping[str, str]


def read_libraries(root: Path) -> LibraryFacts:
    """Ask one child for each library."""
    libraries = tuple(_library(name, ask_child(PROGRAM, name)) for name in NEEDED_BY)
    devices = {}
    if any((root / "sys/class/infiniband").glob("*")):
        devices["libibverbs.so.1"] = "RDMA devices"
    if (root / "proc/driver/nvidia/version").exists():
        devices["libcuda.so.1"] = "an NVIDIA driver"
    return LibraryFacts(libraries, devices)


def check_libraries(facts: LibraryFacts, asked: Asked) -> list[Finding]:
    """State which file of each library was loaded."""
    return [_judged(library, facts.devices.get(library.name, ""), asked) for library in facts.libraries]


def _library(name: str, stated: dict[str, Any]) -> Library:
    others = tuple(stated.get("others", ()))
    return Library(name, stated.get("file", ""), stated.get("version", ""), stated.get("error", ""), others)


def _judged(library: Library, devices: str, asked: Asked) -> Finding:
    name = library.name.partition(".")[0]
    fix = FIXES[library.name]
    if not library.file:
        found = f"not loaded: {library.error}"
        if devices:
            return Finding(name, Verdict.FAIL, f"{found}; but this machine has {devices}", fix)
        return absent(name, found, fix, asked, *NEEDED_BY[library.name])
    found = f"{library.file}" + (f", version {library.version}" if library.version else "")
    if library.error:
        return Finding(
            name,
            Verdict.FAIL if devices or asked & set(NEEDED_BY[library.name]) else Verdict.WARN,
            f"{found}: {library.error}",
            fix,
        )
    if library.name == "libfabric.so.1" and _numbers(library.version) < OLDEST_LIBFABRIC:
        return Finding(name, Verdict.FAIL, found, "libfabric 1.17 or newer is needed: " + fix)
    if library.others:
        more = f"{found}; also installed: {', '.join(library.others)}"
        return Finding(
            name, Verdict.WARN, more, "the loader takes the first; LD_LIBRARY_PATH or the rail's ?library= choose"
        )
    return Finding(name, Verdict.OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
