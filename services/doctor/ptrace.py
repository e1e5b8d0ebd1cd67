"""May processes of one host write into each other? The policy, and a child that really tries process_vm_writev on us.

The child is no ancestor of ours, as peers are not: what Yama's mode 1 refuses to peers, it refuses to it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncfabric_services.doctor.finding import Asked, Finding, Verdict
from asyncfabric_services.doctor.proc_text import read_number

PR_SET_PTRACER = 0x59616D61
WORD = b"asyncfabric-doctor-was-here"
DEADLINE_S = 60
TRIAL = "asyncfabric_services.doctor.ptrace_trial"


@dataclass(frozen=True)
class PtraceFacts:
    """`scope`: Yama's mode, None without Yama. `error`: what the child's write raised, "" when our memory changed."""

    scope: int | None
    error: str


def read_ptrace(root: Path) -> PtraceFacts:
    """Read the policy and try."""
    return PtraceFacts(read_number(root, "proc/sys/kernel/yama/ptrace_scope"), _try_write())


def check_ptrace(facts: PtraceFacts, asked: Asked) -> list[Finding]:
    """State whether ordinary memory travels in one copy."""
    policy = "no Yama" if facts.scope is None else f"Yama's ptrace_scope {facts.scope}"
    if not facts.error:
        return [Finding("ptrace policy", Verdict.OK, f"a child wrote into this process; {policy}")]
    fix = (
        "only memory of fabric.allocate travels in one copy then: sysctl kernel.yama.ptrace_scope=1, "
        "or docker --cap-add SYS_PTRACE, and the same user for both processes"
    )
    return [Finding("ptrace policy", Verdict.WARN, f"process_vm_writev: {facts.error}; {policy}", fix)]


def _try_write() -> str:
    memory = ctypes.create_string_buffer(len(WORD))
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", TRIAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(child.pid), 0, 0, 0)  # EINVAL without Yama, where nothing is restricted
    try:
        stated, _ = child.communicate(f"{ctypes.addressof(memory)} {WORD.decode()}\n", timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"no answer within {DEADLINE_S} s"
    finally:
        libc.prctl(PR_SET_PTRACER, 0, 0, 0, 0)
    if memory.raw == WORD:
        return ""
    return stated.strip() or "the child printed nothing, and the memory is unchanged"
