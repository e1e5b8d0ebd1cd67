"""What the kernel holds for a process that saw others die and come back: no more after 20 deaths than after 5."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from processes import PATIENCE, Process

FIRST, ALL = 5, 20  # deaths before what a process holds is noted, and until it is compared
LOOK_S = 0.02


def held(process: Process) -> dict[str, int]:
    """Return what the kernel holds for a process: pieces, by kind."""
    place = Path("/proc", str(process.child.pid))
    return {
        "descriptors": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
        "maps of shared memory": sum("asyncfabric" in line for line in (place / "maps").read_text().splitlines()),
    }


def nothing_is_kept(survivors: dict[str, Process], die: Callable[[int], None], forgotten: Callable[[], None]) -> None:
    """Let others die, each by `die(number)`; survivors hold no more once the dead are `forgotten`.

    What was closed, or a thread that waited for work, may be gone a moment later: it is looked for until it is.
    """
    for number in range(FIRST):
        die(number)
    forgotten()
    before = {name: held(process) for name, process in survivors.items()}
    for number in range(FIRST, ALL):
        die(number)
    forgotten()
    deadline = time.monotonic() + PATIENCE
    for name, process in survivors.items():
        while more := {kind: count for kind, count in held(process).items() if count > before[name][kind]}:
            assert time.monotonic() < deadline, (
                f"{name} holds {more} after {ALL} deaths, and after {FIRST} {before[name]}"
            )
            time.sleep(LOOK_S)
