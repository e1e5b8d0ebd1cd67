"""Shares: when what one sender has written for one receiver is worth a word. Pure: updates go by it, predictions count.

A word costs two event loops a tenth of a millisecond or more; what is not told is not checked yet.
"""

from __future__ import annotations

SHARES = 512
"""A receiver asks for words worth this part of all that it awaits: they then cost its event loop some 50 ms, whoever
sends, and what is still to be checked at the end is little."""

LEAST_PART = 8
"""Towards the end words are worth less, down to this part of a share, so that the last checks are short."""

GOLDEN = 0x9E3779B1
"""Its multiples, modulo 2^32, are spread evenly, as many as there are."""


def begin_of(number: int) -> float:
    """Return at which part of a share the first word is due, by a number in which the senders of a receiver differ."""
    return ((number + 1) * GOLDEN & 0xFFFFFFFF) / (1 << 32)


class Share:
    """When what one sender has written for one receiver is worth a word.

    It is worth one when it makes up a share; or at least a part of one, and half of what the receiver did not hear of.
    """

    __slots__ = ("_coming", "_least", "_share", "_untold", "_worth")

    def __init__(self, coming_bytes: int, share_bytes: int, begin: float = 1.0) -> None:
        """Look forward to so many bytes.

        Args:
            coming_bytes: of everything for this receiver.
            share_bytes: as it asked for; 0: it wants to hear of each unit.
            begin: part of a share that is worth the first word; senders who begin at different ones tell in turn.
        """
        self._coming = coming_bytes
        self._share = share_bytes
        self._least = share_bytes // LEAST_PART
        self._worth = share_bytes * begin
        self._untold = 0

    def add(self, written_bytes: int) -> bool:
        """Note what was written; return whether a word is due, which then is told."""
        self._coming -= written_bytes
        self._untold += written_bytes
        if self._untold < self._worth and self._untold < max(self._least, self._coming):
            return False
        self.told()
        self._worth = self._share
        return True

    def told(self) -> None:
        """A word was told, due or not."""
        self._untold = 0
