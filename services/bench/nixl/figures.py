"""What `bench nixl` measures, and where: the figures of each table, and the places where pairs of processes run.

Values; imports nothing heavy, since every start of the command reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncfabric_services.bench.options import KIB, MIB, Options
from asyncfabric_services.quantities import format_size

if TYPE_CHECKING:
    from asyncfabric_services.bench.nixl.moving_worker import Operation

EVEN, NEARLY, LISTS_ON_HOST, LISTS_ON_GPU = 1.0, 0.95, 2.5, 50.0
"""Speed of ours over NIXL's that a figure has to reach: of all, of very long writes, of page lists."""
RAILS = {"host": ("local", "tcp:lo"), "cuda": ("cuda:0",)}
"""The tables of each memory."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `pages` is 0 for plain writes; `note` notifies the target, `each` has it answer each.

    `demanded` is the speed over NIXL's that ours has to reach; None where it is only shown.
    """

    op_bytes: int
    pages: int = 0
    window: int = 1
    note: bool = False
    each: bool = False
    demanded: float | None = EVEN

    @property
    def moved_bytes(self) -> int:
        """Return the bytes of one move."""
        return self.op_bytes * (self.pages or 1)

    @property
    def name(self) -> str:
        """Return the figure's name in rows."""
        return ("answered" if self.each else "notified" if self.note else "done") + ("-pages" if self.pages else "")

    @property
    def text(self) -> str:
        """Return the figure for people."""
        pages = f"{self.pages} pages of " if self.pages else ""
        return f"{pages}{format_size(self.op_bytes)}" + (f", {self.window} in flight" if self.window > 1 else "")


NOTED = Figure(4 * KIB, note=True, each=True)
HOST = (
    NOTED,
    *(Figure(size * KIB, pages=1024, note=True, demanded=LISTS_ON_HOST) for size in (4, 16, 64)),
    *(Figure(size * MIB, window=16, note=True) for size in (1, 16)),
    *(Figure(4 * KIB, pages=pages, demanded=LISTS_ON_HOST) for pages in (64, 1024, 10_000)),
    *(Figure(size, demanded=None) for size in (4 * KIB, 16 * MIB)),
)
GPU = (
    NOTED,
    *(Figure(size * MIB, note=True, each=True, demanded=least) for size, least in ((16, EVEN), (256, NEARLY))),
    Figure(16 * MIB, window=8, note=True),
    *(Figure(32 * KIB, pages=pages, note=True, each=True, demanded=LISTS_ON_GPU) for pages in (64, 1024, 10_000)),
    Figure(4 * KIB, pages=1024, note=True, each=True, demanded=LISTS_ON_GPU),
)
TCP = (NOTED, Figure(MIB, window=16, note=True), Figure(64 * KIB, pages=1024, note=True))


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where the pairs run: rails of ours, memory and a network namespace, or None, of each end; polls spin or yield."""

    rails: tuple[str, ...]
    memories: tuple[str, str]
    namespaces: tuple[str | None, str | None]
    operations: tuple[Operation, ...]
    spins: bool = False

    @property
    def name(self) -> str:
        """Return what distinguishes it from others for people."""
        between = " between namespaces" if self.namespaces[0] is not None else ""
        return f"{self.memories[0].partition(':')[0]} over {','.join(self.rails)}{between}"

    @property
    def on_gpu(self) -> bool:
        """State whether the memory is of GPUs."""
        return self.memories[0] != "host"

    @property
    def over_tcp(self) -> bool:
        """State whether everything goes over TCP."""
        return all(rail.partition(":")[0] == "tcp" for rail in self.rails)

    def ends(self, length_bytes: int) -> list[dict[str, Any]]:
        """Return the place of each end: a target on the last GPU has its rails there too."""
        return [
            {
                "rails": self.rails if memory != "cuda:last" else [rail.replace(":0", ":last") for rail in self.rails],
                "namespace": namespace,
                "memory": memory,
                "length_bytes": length_bytes,
                "spins": self.spins,
            }
            for memory, namespace in zip(self.memories, self.namespaces, strict=True)
        ]

    def between(self, namespaces: tuple[str, str], card: str) -> Workplace:
        """Return the same with its ends in two namespaces, which reach each other by this card."""
        return replace(self, namespaces=namespaces, rails=(f"tcp:{card}",))


def figures_of(place: Workplace, options: Options) -> list[Figure]:
    """Return the table for this kind of memory and rails, as far as the regions have room for it."""
    table: Sequence[Figure] = GPU if place.on_gpu else TCP if place.over_tcp else HOST
    return [figure for figure in table if figure.moved_bytes <= options.region_bytes]


def places_of(
    memory: str, rails: Sequence[str], ends: tuple[str, str] | None, operation: str | None, spins: bool
) -> list[Workplace]:
    """Return the places of a run: of memory "host", "cuda" or "both", one for each text of rails."""
    places = []
    for kind in ("host", "cuda") if memory == "both" else (memory,):
        both = operation == "both" or (operation is None and kind == "cuda")
        for text in rails or RAILS[kind]:
            place = Workplace(
                rails=tuple(text.split(",")),
                memories=("cuda:0", "cuda:last") if kind == "cuda" else ("host", "host"),
                namespaces=(None, None),
                operations=("WRITE", "READ") if both else ("READ",) if operation == "read" else ("WRITE",),
                spins=spins,
            )
            places.append(replace(place, namespaces=ends) if ends is not None and place.over_tcp else place)
    return places
