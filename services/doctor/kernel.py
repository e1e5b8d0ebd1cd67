"""The kernel features that the engine uses, by using them: versions lie where a sandbox or seccomp refuses the call."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncfabric_services.doctor.finding import Asked, Finding, Verdict

MADV_POPULATE_WRITE = 23
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
REQUIRED = ("memfd_create", "memory seals", "pidfd_open")
"""Without these the local rail does not open; the others only cost speed."""


@dataclass(frozen=True)
class KernelFacts:
    """`refused`: feature -> why it was refused."""

    release: str
    refused: Mapping[str, str]


def read_kernel(root: Path) -> KernelFacts:
    """Try each feature once; `root` has no part in it."""
    trials = {
        "memfd_create": lambda: os.close(os.memfd_create("asyncfabric-doctor")),
        "memory seals": _try_seals,
        "pidfd_open": lambda: os.close(os.pidfd_open(os.getpid())),
        "MADV_POPULATE_WRITE": _try_populate,
        "eventfd": lambda: os.close(os.eventfd(0)),
        "process_vm_writev": _find_writev,
    }
    refused = {name: error for name, trial in trials.items() if (error := _error_of(trial))}
    return KernelFacts(platform.release(), refused)


def check_kernel(facts: KernelFacts, asked: Asked) -> list[Finding]:
    """State which features are refused."""
    if not facts.refused:
        return [Finding("kernel", Verdict.OK, f"Linux {facts.release}, all features that are used work")]
    found = f"Linux {facts.release}: " + "; ".join(f"{name}: {why}" for name, why in facts.refused.items())
    if any(name in facts.refused for name in REQUIRED):
        fix = "use Linux 5.3 or newer, and a container whose seccomp profile allows these calls"
        return [Finding("kernel", Verdict.FAIL, found, fix)]
    return [Finding("kernel", Verdict.WARN, found, "it works without, slower; Linux 5.14 or newer has them all")]


def _error_of(trial: Callable[[], None]) -> str:
    try:
        trial()
    except (OSError, AttributeError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def _try_seals() -> None:
    file = os.memfd_create("asyncfabric-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK)
    finally:
        os.close(file)


def _try_populate() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        memory.madvise(MADV_POPULATE_WRITE)


def _find_writev() -> None:
    if getattr(ctypes.CDLL(None), "process_vm_writev", None) is None:
        raise OSError(0, "the C library has no process_vm_writev")
