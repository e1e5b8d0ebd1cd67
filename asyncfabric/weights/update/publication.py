"""Publication: a version that a trainer publishes: what was said of it, and what it waits for. Event loop's thread."""

from __future__ import annotations

from typing import NamedTuple

import anyio

from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.commit.messages import Write
from asyncfabric.weights.update.messages import Landing
from asyncfabric.weights.update.messenger import COORDINATOR
from asyncfabric.weights.update.program import Program
from asyncfabric.weights.update.runs import Gate


class Awaited(NamedTuple):
    """What a version that is being published waits for next, and from whom."""

    what: str
    names: tuple[str, ...]


class Publication:
    """A version that is being published.

    Attributes:
        version: of it.
        seated: whether it is known who takes part.
        write: the word that it may be written.
        gates, landings, kinds: what receivers that opened their memory said.
        gone: participants that the coordinator has lost since it said who takes part.
        kind: of the checksums.
        written: whether everything is.
        outcome: None while it is open, "" once it is decided, else why it was aborted.
        scope: of the task that carries it.
    """

    def __init__(self, version: int) -> None:
        """Begin with nothing."""
        self.version: int = version
        self.seated: bool = False
        self.write: Write | None = None
        self.gates: dict[str, Gate] = {}
        self.gone: set[str] = set()
        self.landings: dict[str, Landing | None] = {}
        self.kinds: set[ChecksumKind] = set()
        self.kind: ChecksumKind = "xxh3"
        self.written: bool = False
        self.outcome: str | None = None
        self.scope: anyio.CancelScope = anyio.CancelScope()

    def taking_part(self, program: Program) -> set[str] | None:
        """Return the receivers that rows of this trainer are for and that are still there; None before Write."""
        if self.write is None:
            return None
        return {name for name in program.receivers if name in self.write.receivers and name not in self.gone}

    def awaited(self, program: Program | None, maxima: set[str]) -> Awaited | None:
        """Return what it waits for; None once it is over. `maxima`: of whom some are still to come."""
        if self.outcome is not None:
            return None
        if not self.seated:
            return Awaited("the offers of all trainers", (COORDINATOR,))
        here = self.taking_part(program) if program is not None else None
        if here is None:
            return Awaited("receivers to open their memory", (COORDINATOR,))
        if missing := here - self.gates.keys():
            return Awaited("keys of receivers", tuple(sorted(missing)))
        if maxima:
            return Awaited("maxima of blocks", tuple(sorted(maxima)))
        if not self.written:
            return Awaited("its writes", tuple(sorted(here)))
        return Awaited("the decision", (COORDINATOR,))
