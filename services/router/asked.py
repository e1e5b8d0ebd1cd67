"""The requests inside a router as others see them: where each is, how far it came, what it waits for. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from asyncfabric import Waiting
from asyncfabric_services.router.attempts import AnswerTokens
from asyncfabric_services.router.backend import GenerateRequest


@dataclass(slots=True, eq=False)
class Asked:
    """One request.

    Attributes:
        request, answer: what was asked, and the tokens so far.
        attempts: decode nodes that were asked so far.
        decode: the one that is asked now, empty while none could be chosen.
        sources: prefill nodes that it may ask, the first one first.
        since: when it came, on time.monotonic().
    """

    request: GenerateRequest
    answer: AnswerTokens
    attempts: int = 0
    decode: str = ""
    sources: tuple[str, ...] = ()
    since: float = field(default_factory=monotonic)

    def row(self) -> dict[str, Any]:
        """Return what `/requests` shows; never a word of prompt or answer."""
        return {
            "request": self.request.id,
            "decode": self.decode,
            "sources": list(self.sources),
            "attempts": self.attempts,
            "prompt_tokens": len(self.request.prompt),
            "tokens": len(self.answer.tokens),
            "max_tokens": self.request.max_tokens,
            "for_s": round(monotonic() - self.since, 6),
        }

    def waiting(self) -> Waiting:
        """Return what it waits for: tokens of a decode node, or a node that takes it."""
        what, have, need = f"request {self.request.id}", len(self.answer.tokens), self.request.max_tokens
        goal, late = ("tokens", (self.decode,)) if self.decode else ("a node that takes it", ())
        return Waiting(what, goal, have, need, late, self.since, {"attempts": self.attempts})
