"""The list of all groups of checks, in the order in which they are printed, and for which providers each matters.

A new group is a room with a frozen Facts, a `read_...(root)` and a `check_...(facts, asked)`, and one line here.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncfabric.errors import FabricError
from asyncfabric_services.doctor.automatic import check_automatic, read_automatic
from asyncfabric_services.doctor.cores import check_cores, read_cores
from asyncfabric_services.doctor.finding import PROVIDERS, Asked, Finding, Verdict
from asyncfabric_services.doctor.gpu import check_gpu, read_gpu
from asyncfabric_services.doctor.kernel import check_kernel, read_kernel
from asyncfabric_services.doctor.libraries import check_libraries, read_libraries
from asyncfabric_services.doctor.limits import check_limits, read_limits
from asyncfabric_services.doctor.link_keys import check_link_keys, read_link_keys
from asyncfabric_services.doctor.memory import check_memory, read_memory
from asyncfabric_services.doctor.pcie import check_pcie, read_pcie
from asyncfabric_services.doctor.ptrace import check_ptrace, read_ptrace
from asyncfabric_services.doctor.rdma import check_rdma, read_rdma
from asyncfabric_services.doctor.trials import check_trials, read_trials


@dataclass(frozen=True)
class CheckGroup:
    """One room; `matters_for`: the providers for whose sake it is asked."""

    name: str
    read: Callable[[Path], Any]
    check: Callable[[Any, Asked], list[Finding]]
    matters_for: frozenset[str]


ALL = frozenset(PROVIDERS)
NICS = frozenset({"verbs", "efa"})

GROUPS = (
    CheckGroup("kernel", read_kernel, check_kernel, ALL),
    CheckGroup("cores", read_cores, check_cores, ALL),
    CheckGroup("limits", read_limits, check_limits, ALL),
    CheckGroup("memory", read_memory, check_memory, frozenset({"local"})),
    CheckGroup("ptrace", read_ptrace, check_ptrace, frozenset({"local"})),
    CheckGroup("libraries", read_libraries, check_libraries, ALL - {"local"}),
    CheckGroup("rdma", read_rdma, check_rdma, NICS),
    CheckGroup("pcie", read_pcie, check_pcie, NICS | {"cuda"}),
    CheckGroup("gpu", read_gpu, check_gpu, NICS | {"cuda"}),
    CheckGroup("automatic", read_automatic, check_automatic, ALL),
    CheckGroup("link keys", read_link_keys, check_link_keys, NICS | {"tcp"}),
)


def examine(root: Path, asked: Asked, groups: Sequence[CheckGroup] = GROUPS) -> Iterator[Finding]:
    """Yield findings as they are known; the trials of rails come last. Blocks for about a second."""
    for group in groups:
        if not asked or group.matters_for & asked:
            yield from _looked(group, root, asked)
    providers = tuple(name for name in PROVIDERS if not asked or name in asked)
    trials = CheckGroup("trials", lambda root: read_trials(root, providers), check_trials, ALL)
    yield from _looked(trials, root, asked)


def _looked(group: CheckGroup, root: Path, asked: Asked) -> list[Finding]:
    """Return what a group finds; a room that cannot even look is a failure of its own and does not stop the others."""
    try:
        facts = group.read(root)
    except (FabricError, OSError, RuntimeError, ValueError) as error:  # RuntimeError: Python has no thread
        fix = getattr(error, "remedy", "") or _remedy(error)
        why = error.args[0] if isinstance(error, FabricError) else error  # str() of ours would have the remedy too
        return [Finding(group.name, Verdict.FAIL, f"could not be looked at: {why}", fix)]
    return group.check(facts, asked)


def _remedy(error: Exception) -> str:
    if "start new thread" in str(error) or getattr(error, "errno", 0) == errno.EAGAIN:
        return "no process or thread can be started: raise docker --pids-limit, podPidsLimit, or ulimit -u"
    return "please report it with the output of `asyncfabric topo --save`"
