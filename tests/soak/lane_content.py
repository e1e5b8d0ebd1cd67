"""What a lane carries: one writer's bytes for one region of one target, known to both from a seed.

Byte n of a target is either poison or byte n of the content, whatever was cancelled, so that a target can be judged
even when its writer is dead. Pure functions, no fabric.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

POISON, SCORCH, VOID, GUARD = 0xFE, 0xFD, 0xFC, 0xFB
_BLOCK = 1_000_003  # a prime, so that no page repeats at a page's distance
MARGIN = 4096 + 17

Bytes = NDArray[np.uint8]


def content(seed: int, length: int) -> Bytes:
    """Return the bytes of a seed; none of them is one of the marks above."""
    block = np.random.default_rng(seed).integers(0, 251, min(length, _BLOCK), dtype=np.uint8)
    return np.resize(block, length)


def some_length(dice: random.Random, most: int) -> int:
    """Return a length: nothing, a byte, odd, around pages, or large."""
    choice = dice.random()
    if choice < 0.1:
        return dice.choice((0, 1, 2, 3))
    if choice < 0.5:
        return min(most, max(0, dice.choice((1, 2, 16, 256)) * 4096 + dice.randint(-2, 2)))
    if choice < 0.8:
        return dice.randint(0, min(most, 70_000))
    return dice.randint(0, most)


@dataclass
class Memory:
    """Memory of a region, and the guards around it where it is the user's own."""

    source: Any
    whole: Bytes
    inner: Bytes

    def guarded(self) -> bool:
        """Return whether nothing was written beside the region."""
        before = (self.inner.ctypes.data - self.whole.ctypes.data) if self.whole is not self.inner else 0
        after = before + len(self.inner)
        return bool((self.whole[:before] == GUARD).all() and (self.whole[after:] == GUARD).all())


def own_memory(dice: random.Random, length: int) -> Memory:
    """Return memory of the user's: aligned or not, a part of something larger."""
    if dice.random() < 0.5:
        raw = bytearray(length)
        array = np.frombuffer(raw, np.uint8)
        return Memory(raw, array, array)
    before, after = dice.randint(0, 5000), dice.randint(0, 5000)
    whole = np.full(before + length + after, GUARD, np.uint8)
    inner = whole[before : before + length]
    return Memory(inner, whole, inner)


def judge(memory: Bytes, expected: Bytes, sure: list[tuple[int, int]], maybe: list[tuple[int, int]]) -> str:
    """Return what is wrong with a target's bytes, or nothing: `sure` pieces are there, of `maybe` ones any part."""
    state = np.zeros(len(memory), np.uint8)
    for mark, pieces in ((2, maybe), (1, sure)):
        for offset, length in pieces:
            state[offset : offset + length] = mark
    there, poisoned = memory == expected, memory == POISON
    wrong = ((state == 1) & ~there) | ((state == 0) & ~poisoned) | ((state == 2) & ~there & ~poisoned)
    if not wrong.any():
        return ""
    at = int(wrong.argmax())
    wants = ("nothing", "the content", "the content or nothing")[state[at]]
    there_is = f"{memory[at]:#x} where {wants} ({expected[at]:#x}) belongs"
    return f"{int(wrong.sum())} wrong bytes, the first at {at}: {there_is}"
