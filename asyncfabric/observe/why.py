"""Who waits for what, what is missing, from whom: `fabric.why()` as text for people.

Pure, any thread. The lines are made by those who wait (the sinks of `asyncfabric._bridge.dispatcher`).
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from asyncfabric.types import Waiting


def format_waiting(lines: Iterable[Waiting]) -> str:
    """Return the lines of `fabric.why()` as text for people, one line each; one line also when nobody waits."""
    out = []
    now = monotonic()
    for line in lines:
        age = f", for {now - line.since:.3f} s" if line.since else ""
        source = f", from {', '.join(line.missing_from)}" if line.missing_from else ""
        out.append(f"{line.what} waits for {line.waits_for}: {line.have} of {line.need}{source}{age}")
    return "\n".join(out) if out else "nobody waits for anything"
