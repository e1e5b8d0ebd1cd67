"""Random programs of transfers and the model they are held against.

Each arrival has a target range of its own, so the model knows at any moment which arrivals are completely there; each
transfer has a source range of its own, so it can be scorched the moment its await ended. Nothing here opens a fabric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st

SOURCE_BYTES = 1 << 20
TARGET_BYTES = 1 << 21
POISON, SCORCH, VOID = 0xA5, 0x5C, 0x3D  # untouched target, overwritten source, target after a revocation
PLAIN = bytes(value for value in range(256) if value not in (POISON, SCORCH, VOID))


@dataclass(frozen=True)
class Submit:
    """Submit one transfer. `lengths` are its pieces: one of a write, pages (all equal), or targets of a scatter."""

    op: Literal["write", "pages", "scatter", "signal"]
    lengths: tuple[int, ...]
    gap: int = 0


@dataclass(frozen=True)
class Settle:
    """Await the n-th oldest transfer; cancel `patience` checkpoints later, or None: await its end."""

    which: int
    patience: int | None


@dataclass(frozen=True)
class Pause:
    """Let the event loop turn."""

    turns: int


@dataclass(frozen=True)
class Revoke:
    """Revoke the target's key, and get a new one."""


Step = Submit | Settle | Pause | Revoke

_lengths = st.one_of(
    st.integers(0, 64), st.sampled_from((4095, 4096, 4097, 8191, 8193, 16_385)), st.integers(0, 120_000)
)
_submits = st.one_of(
    st.builds(Submit, st.just("write"), st.tuples(_lengths), st.integers(0, 5)),
    st.builds(
        lambda count, size, gap: Submit("pages", (size,) * count, gap),
        st.integers(0, 40),
        st.integers(1, 3000),
        st.integers(0, 5),
    ),
    st.builds(Submit, st.just("scatter"), st.lists(_lengths, max_size=4).map(tuple), st.integers(0, 5)),
    st.just(Submit("signal", ())),
)
_settles = st.builds(Settle, st.integers(0, 5), st.one_of(st.none(), st.integers(0, 6)))
_pauses = st.builds(Pause, st.integers(1, 8))


def programs(*, revokes: bool = False) -> st.SearchStrategy[list[Step]]:
    """Return programs of up to 30 steps; submitting is the most frequent."""
    choices = [_submits, _submits, _settles, _pauses]
    if revokes:
        choices.append(st.just(Revoke()))
    return st.lists(st.one_of(*choices), min_size=1, max_size=30)


@dataclass(frozen=True)
class Piece:
    """One logical arrival: `content` belongs at `offset` of the target."""

    offset: int
    content: bytes


@dataclass
class Planned:
    """Where one submitted transfer reads and writes."""

    step: Submit
    source: int
    length: int
    pieces: list[Piece] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    generation: int = 0  # revocations before it was submitted


class Plan:
    """Gives each transfer ranges of its own until the memory is used up, then returns None."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.next_source = 0
        self.next_target = 0

    def place(self, step: Submit) -> Planned | None:
        total = sum(step.lengths)
        spread = total + step.gap * (len(step.lengths) + 1)
        if self.next_source + total > SOURCE_BYTES or self.next_target + spread > TARGET_BYTES:
            return None
        planned = Planned(step, self.next_source, total)
        for length in step.lengths:
            self.next_target += step.gap
            planned.sources.append(self.next_source)
            planned.pieces.append(Piece(self.next_target, self.content[self.next_source : self.next_source + length]))
            self.next_source += length
            self.next_target += length
        if step.op == "signal":
            planned.pieces.append(Piece(0, b""))
        return planned


def present(memory: memoryview, pieces: list[Piece]) -> int:
    """Return how many of the arrivals are completely there."""
    return sum(memory[piece.offset : piece.offset + len(piece.content)] == piece.content for piece in pieces)
