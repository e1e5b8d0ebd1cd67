"""Where the tensors of a receiver lie in its memory: one region for all, the same arithmetic at senders and receivers.

Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.plan import Plan

ALIGN_BYTES = 256
"""Where tensors begin: what kernels like to load."""


class TensorLayout:
    """The tensors of one receiver, one after the other.

    Attributes:
        offsets: by tensor, where it begins.
        lengths: by tensor, its bytes.
        total_bytes: of all, with the gaps between them; at least 1.
        by_region: int64 (regions of the plan,): where each begins, -1 for those that this receiver has not.
    """

    def __init__(self, plan: Plan, receiver: int) -> None:
        """Lay out what `plan.region_bytes(receiver)` lists, in its order."""
        self.lengths: Mapping[str, int] = plan.region_bytes(receiver)
        self.offsets: dict[str, int] = {}
        at = 0
        for name, length in self.lengths.items():
            self.offsets[name] = at
            at += -(-length // ALIGN_BYTES) * ALIGN_BYTES
        self.total_bytes: int = max(at, 1)
        numbers = {name: number for number, name in enumerate(plan.regions)}
        self.by_region: Ints = np.full(len(plan.regions), -1, np.int64)
        for name, offset in self.offsets.items():
            self.by_region[numbers[name]] = offset

    def views(self, memory: Any) -> dict[str, Any]:
        """Return the bytes of each tensor in memory of `total_bytes`: slices of the array or tensor of bytes."""
        return {name: memory[at : at + self.lengths[name]] for name, at in self.offsets.items()}

    def named(self, offset: int) -> str:
        """Return the tensor that a byte of the memory belongs to, for messages."""
        return next(
            (name for name, at in self.offsets.items() if at <= offset < at + max(1, self.lengths[name])), "a gap"
        )


@lru_cache(maxsize=4096)
def layout_of(plan: Plan, receiver: int) -> TensorLayout:
    """Return the layout of a receiver; plans are values that do not change, so it is worked out once."""
    return TensorLayout(plan, receiver)
