"""How rails share themselves out among the transfers under way in one step: fairly, never above a port's rate. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 4
"""Rounds of handing out what is left; each leaves less idle, none hands out more than there is."""


def share(waiting: Floats, sends: Floats, receives: Floats) -> Floats:
    """Return the bytes of each transfer that one step carries, at most those waiting.

    Each sender divides what its port can carry equally among the receivers for which it has bytes, as a NIC goes round
    its queues; a receiver that gets too much slows all its senders alike; what then is left is handed out again.

    Args:
        waiting: (senders, receivers).
        sends: (senders,): what each port can send in the step.
        receives: (receivers,): what each can receive.
    """
    moved = np.zeros_like(waiting)
    sends, receives = sends.copy(), receives.copy()
    left = waiting.copy()
    for _ in range(ROUNDS):
        asking = (left > 0) & (receives > 0)
        each = sends / np.maximum(asking.sum(axis=1), 1)
        wanted = np.minimum(left, each[:, None] * asking)
        wanted *= np.minimum(1.0, receives / np.maximum(wanted.sum(axis=0), 1e-9))
        moved += wanted
        left -= wanted
        sends = np.maximum(sends - wanted.sum(axis=1), 0.0)
        receives = np.maximum(receives - wanted.sum(axis=0), 0.0)
        receives[receives < 1.0] = 0.0
    return moved
