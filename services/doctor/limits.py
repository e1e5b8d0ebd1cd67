"""What the process may lock, open and start: RLIMIT_MEMLOCK for registered memory, RLIMIT_NOFILE for peers, threads."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from asyncfabric_services.doctor.finding import Asked, Finding, Verdict
from asyncfabric_services.doctor.proc_text import CAP_IPC_LOCK, has_capability, read_number, read_text

LOCKED_NEEDED = 1 << 30
FILES_NEEDED, FILES_WANTED = 256, 4096
FILES_RAISED = 16384
"""The engine raises the soft limit so far by itself, within the hard one."""
TASKS_NEEDED, TASKS_WANTED = 8, 64
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class LimitFacts:
    """Bytes and files. `may_lock`: CAP_IPC_LOCK, which removes the first limit. `nics`: RDMA devices exist.

    `tasks_left`: processes and threads that the control groups still allow, None without a bound.
    """

    locked_bytes: int
    may_lock: bool
    files: int
    most_files: int
    nics: bool
    tasks_left: int | None = None


def read_limits(root: Path) -> LimitFacts:
    """Read the limits of this process."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = any((root / "sys/class/infiniband").glob("*"))
    return LimitFacts(locked, has_capability(root, CAP_IPC_LOCK), files, most_files, devices, _tasks_left(root))


def check_limits(facts: LimitFacts, asked: Asked) -> list[Finding]:
    """State whether memory can be registered and peers be opened."""
    return [_memlock(facts, asked), _files(facts), _tasks(facts)]


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
    raised = FILES_RAISED if facts.most_files == UNLIMITED else min(FILES_RAISED, facts.most_files)
    if facts.files >= FILES_NEEDED and raised >= FILES_WANTED:
        return Finding(name, Verdict.OK, f"{facts.files}, raised up to {raised} when half of them are open")
    more = f"; the hard limit is {facts.most_files}" if facts.most_files > facts.files else ""
    fix = f"ulimit -n {FILES_WANTED}: each peer takes a few"
    verdict = Verdict.FAIL if facts.files < FILES_NEEDED else Verdict.WARN
    return Finding(name, verdict, f"{facts.files}{more}", fix)


def _tasks(facts: LimitFacts) -> Finding:
    name = "threads"
    if facts.tasks_left is None:
        return Finding(name, Verdict.OK, "no bound of a control group")
    found = f"{facts.tasks_left} more may be started"
    if facts.tasks_left >= TASKS_WANTED:
        return Finding(name, Verdict.OK, found)
    fix = "a fabric has about 3 threads, Python's more: docker --pids-limit, or podPidsLimit of the kubelet"
    return Finding(name, Verdict.FAIL if facts.tasks_left < TASKS_NEEDED else Verdict.WARN, found, fix)


def _tasks_left(root: Path) -> int | None:
    """Return what the tightest control group on the way up leaves, of either version."""
    left = []
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "pids" not in controllers.split(","):
            continue
        folder = Path(path.lstrip("/"))
        for level in (folder, *folder.parents):
            group = f"sys/fs/cgroup/{'pids/' if controllers else ''}{level}"
            most, now = read_number(root, f"{group}/pids.max"), read_number(root, f"{group}/pids.current")
            if most is not None:
                left.append(max(0, most - (now or 0)))
    return min(left, default=None)
