"""MissingRankError: a step that cannot go on, with the names of those who are missing.

Values, any thread; `shortly_before_deadline` runs on the event loop's.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from asyncfabric.errors import PeerError

MARGIN_S = 1.0
MARGIN_SHARE = 0.2


class MissingRankError(PeerError):
    """Ranks did not do their part of a step: they are lost, or did not do it before the caller's deadline.

    Attributes:
        ranks: who is missing, ascending.
        lost: whether they are known to be lost; otherwise they are late, and the same call may be made again.
    """

    def __init__(self, message: str, *, ranks: Iterable[int], lost: bool, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))
        self.lost = lost


def missing(what: str, ranks: Iterable[int], *, lost: bool) -> MissingRankError:
    """Return the error for ranks that are missing in `what`."""
    named = sorted(ranks)
    who = f"rank {named[0]}" if len(named) == 1 else "ranks " + ", ".join(map(str, named))
    if lost:
        remedy = "await moe.exclude(ranks) on all other ranks goes on without them; the steps in flight are lost"
        return MissingRankError(f"{what}: {who} lost", ranks=named, lost=True, remedy=remedy)
    remedy = "call it again to wait longer, or await moe.exclude(ranks) on all other ranks to go on without them"
    return MissingRankError(f"{what}: {who} silent until the deadline", ranks=named, lost=False, remedy=remedy)


def shortly_before_deadline() -> anyio.CancelScope:
    """Return a scope that ends a little before the caller's deadline, so that an error can still state who is missing.

    A fifth of what remains, at most a second: when the caller's own scope has ended, nobody receives anything any
    more, and a loop on a busy machine may be late by a good part of that.
    """
    deadline = anyio.current_effective_deadline()
    remaining = deadline - anyio.current_time()
    return anyio.CancelScope(deadline=deadline - max(0.0, min(MARGIN_S, remaining * MARGIN_SHARE)))
