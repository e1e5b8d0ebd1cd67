"""Cores and clocks: how many the process really has, whether they are near the NICs, what reading the time costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from asyncfabric.observe.topology import Topology, read_topology
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict
from asyncfabric_services.doctor.proc_text import read_text

BUSY_NEEDS = 4
FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "riscv_clocksource", "timebase")
"""Those that are read without a system call."""


@dataclass(frozen=True)
class CoreFacts:
    """`quota`: CPUs' worth of time that a control group gives, None without a bound. `far_nics`: none of their CPUs."""

    online: int
    allowed: int
    quota: float | None
    clock: str | None
    far_nics: tuple[str, ...]


def read_cores(root: Path) -> CoreFacts:
    """Read CPUs, quota and clock."""
    topology = read_topology(root)
    return CoreFacts(
        online=sum(len(node.cpus) for node in topology.nodes),
        allowed=len(topology.allowed_cpus),
        quota=_quota(root),
        clock=read_text(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        far_nics=far_nics(topology),
    )


def far_nics(topology: Topology) -> tuple[str, ...]:
    """Return the NICs that serve somebody, whose NUMA node is known, and on whose node the process may not run."""
    far = {nic for group in topology.groups if group.numa_node >= 0 and not group.cpus_are_near for nic in group.nics}
    return tuple(topology.nics[nic].name for nic in sorted(far))


def check_cores(facts: CoreFacts, asked: Asked) -> list[Finding]:
    """State what polling mode fits, whether workers run near their NICs, and whether time is cheap."""
    return [_polling(facts), _affinity(facts), _clock(facts)]


def _polling(facts: CoreFacts) -> Finding:
    name = "cores for polling"
    usable = facts.allowed if facts.quota is None else min(float(facts.allowed), facts.quota)
    found = f"{facts.allowed} of {facts.online} CPUs" + (f", quota {facts.quota:g}" if facts.quota is not None else "")
    if usable < 1:
        fix = "less than one CPU: the worker and the program stop each other; raise the quota (docker --cpus)"
        return Finding(name, Verdict.FAIL, found, fix)
    if facts.quota is not None and facts.quota < facts.allowed:
        fix = 'polling="busy" would spend the quota and then stand still: keep "adaptive", or use a cpuset instead'
        return Finding(name, Verdict.WARN, found, fix)
    if usable < BUSY_NEEDS:
        fix = 'keep polling="adaptive": "busy" takes a whole core for each fabric'
        return Finding(name, Verdict.WARN, found, fix)
    return Finding(name, Verdict.OK, found)


def _affinity(facts: CoreFacts) -> Finding:
    if not facts.far_nics:
        return Finding("CPU affinity", Verdict.OK, "the process may run on the NUMA nodes of its NICs")
    found = f"no allowed CPU on the NUMA node of {', '.join(facts.far_nics)}"
    fix = "widen the cpuset or taskset to those nodes; `asyncfabric topo` shows them"
    return Finding("CPU affinity", Verdict.WARN, found, fix)


def _clock(facts: CoreFacts) -> Finding:
    if facts.clock in FAST_CLOCKS:
        return Finding("clock source", Verdict.OK, facts.clock)
    fix = "reading the time is a slow system call: boot with clocksource=tsc, or echo tsc into current_clocksource"
    return Finding("clock source", Verdict.WARN, facts.clock or "unknown", fix)


def _quota(root: Path) -> float | None:
    """Return the tightest bound of cgroup v2's cpu.max on the way up, or v1's of the CPU controller."""
    bounds = []
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            folder = Path(path.lstrip("/"))
            for level in (folder, *folder.parents):
                words = (read_text(root, f"sys/fs/cgroup/{level}/cpu.max") or "max").split()
                bounds += _bound(words[0], words[1] if len(words) > 1 else "100000")
        elif "cpu" in controllers.split(","):
            for part in (path.strip("/"), ""):
                folder_v1 = os.path.join("sys/fs/cgroup/cpu", part)
                quota = read_text(root, f"{folder_v1}/cpu.cfs_quota_us") or "max"
                bounds += _bound(quota, read_text(root, f"{folder_v1}/cpu.cfs_period_us") or "100000")
    return min(bounds, default=None)


def _bound(quota: str, period: str) -> list[float]:
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", or -1 in v1: no bound
        return []
    return [int(quota) / int(period)]
