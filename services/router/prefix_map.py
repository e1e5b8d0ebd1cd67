"""Which nodes computed which blocks of prompts lately: what a router remembers. Pure, bounded; one task uses it.

It is a guess: a node may have dropped blocks, and other routers' requests are not in it. Nodes stand by name and
incarnation, so what a restarted node had is never found again, and goes with age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncfabric.actors import Identity

MOST_BLOCKS = 1 << 17
"""Blocks remembered, at some 300 bytes each: of 16 tokens they are two million tokens."""
MOST_HOLDERS = 16
"""Nodes remembered of one block, the latest ones: a beginning that all prompts share is on all nodes."""


class PrefixMap:
    """Blocks by hash, the one that was used longest ago first, each with the nodes that have it."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._holders: dict[bytes, tuple[Identity, ...]] = {}
        self._held: Counter[Identity] = Counter()

    def matched(self, blocks: Sequence[bytes]) -> Counter[Identity]:
        """Return how many blocks, from the first one on, each node has; nodes without the first are left out."""
        found: Counter[Identity] = Counter()
        there: set[Identity] | None = None
        for block in blocks:
            holders = self._holders.get(block, ())
            there = set(holders) if there is None else there.intersection(holders)
            if not there:
                break
            found.update(there)
        return found

    def held(self, node: Identity) -> int:
        """Return how many blocks of a node are remembered."""
        return self._held[node]

    def add(self, node: Identity, blocks: Sequence[bytes]) -> None:
        """Remember that a node has these blocks of one prompt."""
        for block in reversed(blocks[: self._most]):  # the end of a prompt is forgotten before its beginning
            before = self._holders.pop(block, ())
            others = tuple(one for one in before if one != node)
            kept = others[-(MOST_HOLDERS - 1) :]
            self._holders[block] = (*kept, node)
            self._forget(others[: len(others) - len(kept)])
            self._held[node] += len(others) == len(before)
        while len(self._holders) > self._most:
            self._forget(self._holders.pop(next(iter(self._holders))))

    def _forget(self, nodes: Sequence[Identity]) -> None:
        for node in nodes:
            self._held[node] -= 1
            if not self._held[node]:
                del self._held[node]

    def __len__(self) -> int:
        return len(self._holders)
