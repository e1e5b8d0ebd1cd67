"""The receiving end of answers: an actor that decode nodes send tokens to, and the attempts that wait for them.

Runs on the event loop. No node is chosen here; that is `cluster_backend`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import ClassVar

import trio

from asyncfabric import PeerError
from asyncfabric.actors import Actor, handles
from asyncfabric_services.nodes.messages import Tokens

ATTEMPTS = "attempts"
"""Name of the actor."""


class AnswerTokens:
    """The tokens of one answer, from however many attempts; iterate it once.

    Attributes:
        tokens: those that came so far.

    Cancellation: of the iteration takes no token away.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._send, self._receive = trio.open_memory_channel[int](math.inf)  # bounded by the request's max_tokens
        self._error: Exception | None = None

    def take(self, tokens: list[int]) -> None:
        """Add tokens."""
        for token in tokens:
            self.tokens.append(token)
            self._send.send_nowait(token)

    def end(self, error: Exception | None = None) -> None:
        """End the answer; an `error` is raised to the reader after the tokens before it."""
        self._error = error
        self._send.close()

    def __aiter__(self) -> AsyncIterator[int]:
        """Return itself."""
        return self

    async def __anext__(self) -> int:
        """Return the next token, or raise what ended the answer."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None


class Attempt:
    """One try of a request at one decode node.

    Attributes:
        key: its name in messages.
        first: set when its first token came.
        asking: cancelled when the node sent what is no answer; `check` raises then.
    """

    def __init__(self, key: str, answer: AnswerTokens, most: int, vocabulary: int) -> None:
        self.key = key
        self.first = trio.Event()
        self.asking = trio.CancelScope()
        self._answer = answer
        self._most, self._vocabulary = most, vocabulary
        self._wrong = ""
        self._count = 0
        self._more = trio.Event()

    def take(self, tokens: list[int]) -> None:
        """Take what the decode node sent; nothing from what is no answer on."""
        beyond = [token for token in tokens if not 0 <= token < self._vocabulary]
        if beyond:
            self._wrong = f"token {beyond[0]} of a vocabulary of {self._vocabulary}"
        elif self._count + len(tokens) > self._most:
            self._wrong = f"{self._count + len(tokens)} tokens where {self._most} were asked for"
        if self._wrong:
            self.asking.cancel()
            return
        self._answer.take(tokens)
        self._count += len(tokens)
        self.first.set()
        self._more.set()

    def check(self) -> None:
        """Raise PeerError if the node sent what is no answer."""
        if self._wrong:
            raise PeerError(f"it sent {self._wrong}")

    async def complete(self, count: int) -> None:
        """Return when `count` tokens have come: the answer to an ask may overtake tokens that were sent before it.

        Cancellation: only this wait ends.
        """
        while self._count < count:
            self._more = trio.Event()
            await self._more.wait()


class Attempts:
    """The attempts that wait for tokens."""

    def __init__(self) -> None:
        self._open: dict[str, Attempt] = {}

    @contextmanager
    def attempt(self, request_id: str, answer: AnswerTokens, most: int, vocabulary: int) -> Iterator[Attempt]:
        """Open an attempt at up to `most` tokens; what is sent to it after the scope is dropped."""
        attempt = Attempt(f"{request_id}/{secrets.token_hex(4)}", answer, most, vocabulary)
        self._open[attempt.key] = attempt
        try:
            yield attempt
        finally:
            del self._open[attempt.key]

    def take(self, message: Tokens) -> None:
        """Hand tokens to the attempt that they are for; late ones are dropped."""
        attempt = self._open.get(message.attempt)
        if attempt is not None:
            attempt.take(message.tokens)


class AttemptsActor(Actor):
    """Takes `Tokens` of decode nodes."""

    mailbox_capacity: ClassVar[int] = 4096

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts

    @handles(Tokens)
    async def tokens(self, message: Tokens) -> None:
        """Take tokens."""
        self._attempts.take(message)
