"""From tokens to the text that a client may see: pieces of characters and of stop strings are held back. Pure."""

from __future__ import annotations

from asyncfabric_services.runner.tokenizer import Tokenizer


class Spoken:
    """The text of one answer as its tokens come; the pieces joined are the same whether streamed or not.

    Attributes:
        tokens: how many were fed.
        stopped: whether a stop string was found; no text follows it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._pieces = tokenizer.pieces()
        self._stops = stops
        self._held = ""
        self.tokens = 0
        self.stopped = False

    def feed(self, token: int) -> str:
        """Take a token; returns the text that is certain now, perhaps none."""
        self.tokens += 1
        return self._release(self._pieces.feed(token), final=False)

    def finish(self) -> str:
        """Return what was held back; call it once, after the last token."""
        return "" if self.stopped else self._release(self._pieces.finish(), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        self._held += text
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
