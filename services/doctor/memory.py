"""Memory between processes of one host: huge pages under memory files."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from asyncfabric_services.doctor.finding import Asked, Finding, Verdict
from asyncfabric_services.doctor.proc_text import chosen, read_text

MADV_COLLAPSE = 25
HUGE = 2 << 20


@dataclass(frozen=True)
class MemoryFacts:
    """`collapse_error`: what MADV_COLLAPSE of a memory file raised, "" when it worked."""

    thp: str | None
    thp_shmem: str | None
    collapse_error: str


def read_memory(root: Path) -> MemoryFacts:
    """Read the settings and try to collapse two huge pages."""
    base = "sys/kernel/mm/transparent_hugepage"
    return MemoryFacts(
        thp=chosen(read_text(root, f"{base}/enabled")),
        thp_shmem=chosen(read_text(root, f"{base}/shmem_enabled")),
        collapse_error=_try_collapse(),
    )


def check_memory(facts: MemoryFacts, _asked: Asked) -> list[Finding]:
    """State whether lists of small pages will do well."""
    return [_huge_pages(facts)]


def _huge_pages(facts: MemoryFacts) -> Finding:
    settings = f"transparent huge pages {facts.thp or 'not in this kernel'}, for files {facts.thp_shmem or 'unknown'}"
    if not facts.collapse_error:
        return Finding("huge pages", Verdict.OK, f"memory files get them on request; {settings}")
    # Seen: 6.1 refuses while shmem_enabled is never, 6.18 does it all the same.
    fix = "lists of small pages are a quarter slower: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding("huge pages", Verdict.WARN, f"memory files get none ({facts.collapse_error}); {settings}", fix)


def _try_collapse() -> str:
    """Map a memory file of four huge pages, touch it, and collapse the whole ones inside; return the refusal."""
    file = os.memfd_create("asyncfabric-doctor")
    try:
        os.ftruncate(file, 4 * HUGE)
        with mmap.mmap(file, 4 * HUGE) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            start = -ctypes.addressof(anchor) % HUGE
            del anchor  # the map cannot be closed while it is exported
            for page in range(start, start + 2 * HUGE, mmap.PAGESIZE):
                memory[page] = 1
            memory.madvise(MADV_COLLAPSE, start, 2 * HUGE)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(file)
    return ""
