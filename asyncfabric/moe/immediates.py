"""Which immediates an exchange uses: a span that none of its fabrics has used for an exchange before.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from asyncfabric import Fabric

FIRST_IMM, END_IMM = 1 << 18, 1 << 19
"""Immediates of exchanges: above what users name themselves, below what `fabric.counter()` picks."""

_next_imm: WeakKeyDictionary[Fabric, int] = WeakKeyDictionary()


def proposed_imm(fabric: Fabric) -> int:
    """Return the first immediate that a fabric would use; the largest that any member proposes is taken."""
    return _next_imm.get(fabric, FIRST_IMM)


def first_imm(fabric: Fabric, proposed: Sequence[int], span: int) -> int:
    """Return the first immediate that no member has used yet, and note what is used now.

    Wraps round after 262,144 of them; peers have long confirmed by then that the old counters are closed.
    """
    base = max(proposed)
    if base < FIRST_IMM or base + span > END_IMM:
        base = FIRST_IMM
    _next_imm[fabric] = base + span
    return base
