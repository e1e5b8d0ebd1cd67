"""What becomes of open fabrics in a child of os.fork(): they are closed there, with the reason. The parent's go on.

The child has none of the engine's threads but all of its memory, a part of it shared with the parent and its peers. So
nothing of a copy may move: the compiled engine refuses calls (hold.pxi), and here the fabric is marked as closed, so
that leaving its `async with` in the child waits for nobody. Runs in the child, on the thread that forked.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from asyncfabric._bridge import faults


class Copied(Protocol):
    """What a fork copies."""

    closed: bool

    def close_in_child(self) -> None:
        """Mark the copy as closed, in the child."""


_open: WeakSet[Copied] = WeakSet()


def close_in_children(fabric: Copied) -> None:
    """Have this fabric marked as closed in children of a fork."""
    _open.add(fabric)


def _in_child() -> None:
    copies = [fabric for fabric in _open if not fabric.closed]
    for fabric in copies:
        fabric.close_in_child()
    if copies:
        faults.mark_forked()


os.register_at_fork(after_in_child=_in_child)
