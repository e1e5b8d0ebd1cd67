"""What a node shows of itself beside health and metrics: who waits, its peers, its regions. Called on the event loop.

A node fills in what it has; what it has not is empty. Rows are plain values for JSON. Looking changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from asyncfabric import Waiting

Row = dict[str, Any]
Rows = Callable[[], Sequence[Row]]


def _nothing() -> list[Row]:
    return []


def _nobody() -> list[Waiting]:
    return []


@dataclass(slots=True)
class View:
    """What is shown.

    Attributes:
        waits: who waits for what, from whom.
        peers: other processes that this one speaks with.
        regions: registered memory.
        more: further paths of this role, such as `nodes` of a directory.
    """

    waits: Callable[[], Sequence[Waiting]] = _nobody
    peers: Rows = _nothing
    regions: Rows = _nothing
    more: dict[str, Rows] = field(default_factory=dict)

    def pages(self) -> dict[str, Rows]:
        """Return what each path shows; the path is also the key of the rows in the answer."""
        return {"why": self._plain_waits, "peers": self.peers, "regions": self.regions, **self.more}

    def _plain_waits(self) -> list[Row]:
        return [plain_waiting(line) for line in self.waits()]


def plain_waiting(line: Waiting) -> Row:
    """Return a wait for JSON; `for_s` is how long it waits already, None where nobody knows."""
    return {
        "what": line.what,
        "waits_for": line.waits_for,
        "have": line.have,
        "need": line.need,
        "missing_from": list(line.missing_from),
        "for_s": round(monotonic() - line.since, 6) if line.since else None,
        "detail": dict(line.detail),
    }
