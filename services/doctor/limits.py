"""What the process may lock and open: RLIMIT_MEMLOCK for registered memory, RLIMIT_NOFILE for peers."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from asyncfabric_services.doctor.finding import Asked, Finding, Verdict
from asyncfabric_services.doctor.proc_text import CAP_IPC_LOCK, has_capability

LOCKED_NEEDED = 1 << 30
FILES_NEEDED, FILES_WANTED = 256, 4096
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class LimitFacts:
    """Bytes and files. `may_lock`: CAP_IPC_LOCK, which lifts the first limit. `nics`: RDMA devices exist."""

    locked_bytes: int
    may_lock: bool
    files: int
    most_files: int
    nics: bool


def read_limits(root: Path) -> LimitFacts:
    """Read the limits of this process."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = any((root / "sys/class/infiniband").glob("*"))
    return LimitFacts(locked, has_capability(root, CAP_IPC_LOCK), files, most_files, devices)


def check_limits(facts: LimitFacts, asked: Asked) -> list[Finding]:
    """Say whether memory can be registered and peers be opened."""
    return [_memlock(facts, asked), _files(facts)]


def _memlock(facts: LimitFacts, asked: Asked) -> Finding:
    name = "memlock limit"
    if facts.locked_bytes == UNLIMITED:
        return Finding(name, Verdict.OK, "unlimited")
    found = f"{facts.locked_bytes >> 10} KiB"
    if facts.may_lock:
        return Finding(name, Verdict.OK, f"{found}, which does not bind this process (CAP_IPC_LOCK)")
    if facts.locked_bytes >= LOCKED_NEEDED:
        return Finding(name, Verdict.OK, found)
    fix = (
        "RDMA cannot register more than that: ulimit -l unlimited, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1"
    )
    if facts.nics or asked & {"verbs", "efa"}:
        return Finding(name, Verdict.FAIL, found, fix)
    return Finding(name, Verdict.ABSENT, f"{found}; no RDMA device here", fix)


def _files(facts: LimitFacts) -> Finding:
    name = "file descriptors"
    if facts.files == UNLIMITED or facts.files >= FILES_WANTED:
        return Finding(name, Verdict.OK, "unlimited" if facts.files == UNLIMITED else f"{facts.files}")
    more = f"; the hard limit is {facts.most_files}" if facts.most_files > facts.files else ""
    fix = f"ulimit -n {FILES_WANTED}: each peer takes a few"
    verdict = Verdict.FAIL if facts.files < FILES_NEEDED else Verdict.WARN
    return Finding(name, verdict, f"{facts.files}{more}", fix)
