"""Clients: a mixed load of real text over the OpenAI API, and what became of each request. Runs on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import openai
import trio

TEMPERATURE = 0.0
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a client wants: a prompt and the length of the answer in tokens."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What a client got.

    Attributes:
        ask: what it wanted.
        text: of the answer, also when it broke off.
        error: why it broke off; empty for a whole answer.
        ttft_seconds: to the first piece of text.
        seconds: to the end.
    """

    ask: LoadRequest
    text: str
    error: str
    ttft_seconds: float
    seconds: float

    @property
    def per_token_seconds(self) -> float:
        """Return the mean time of a token after the first."""
        return (self.seconds - self.ttft_seconds) / max(1, self.ask.max_tokens - 1)


class Load:
    """Asks in turn, several clients at a time, until observed to stop.

    Attributes:
        outcomes: of ended requests.
    """

    def __init__(self, address: str, model: str, asks: Sequence[LoadRequest]) -> None:
        self.outcomes: list[LoadOutcome] = []
        self._address = address
        self._model = model
        self._asks = asks
        self._numbers = count()
        self._stopping = False
        self._ended = trio.Event()

    async def run(self, clients: int) -> None:
        """Ask until `stop`, then return when the last answers are there.

        Cancellation: requests under way are dropped.
        """
        async with (
            openai.AsyncOpenAI(base_url=f"{self._address}/v1", api_key="unused", max_retries=0) as client,
            trio.open_nursery() as nursery,
        ):
            for _ in range(clients):
                nursery.start_soon(self._client, client)

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopping = True

    async def until(self, ended: int) -> None:
        """Return when so many more requests have ended.

        Cancellation: only this wait ends.
        """
        wanted = len(self.outcomes) + ended
        while len(self.outcomes) < wanted:
            await self._ended.wait()

    async def _client(self, client: openai.AsyncOpenAI) -> None:
        while not self._stopping:
            ask = self._asks[next(self._numbers) % len(self._asks)]
            self.outcomes.append(outcome := await self._one(client, ask))
            self._ended.set()
            self._ended = trio.Event()
            if outcome.error:
                await trio.sleep(PAUSE_SECONDS)  # as clients do; a router that is gone refuses at once

    async def _one(self, client: openai.AsyncOpenAI, ask: LoadRequest) -> LoadOutcome:
        began, first, text, error = trio.current_time(), 0.0, "", ""
        try:
            stream = await client.completions.create(
                model=self._model,
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                temperature=TEMPERATURE,
                stream=True,
            )
            async with stream:
                async for piece in stream:
                    first = first or trio.current_time()
                    text += piece.choices[0].text
        except openai.OpenAIError as failure:
            error = f"{type(failure).__name__}: {failure}"
        ended = trio.current_time()
        return LoadOutcome(ask, text, error, (first or ended) - began, ended - began)
