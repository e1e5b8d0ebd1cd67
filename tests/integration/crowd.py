"""Clients of a cluster that ask without end, each in a thread; some leave in the middle. What became of each is kept.

Everything that is chosen is chosen by numbers from one seed. Who wants to do something in the middle of the load waits
until so many more pieces of answers have come, so that it happens under load on machines of any speed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import openai
from cluster import MODEL, PATIENCE, Service
from cluster import ask as ask_by_socket

MOST_PIECES_BEFORE_LEAVING = 12


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, how many tokens are wanted, and the right answer."""

    prompt: str
    tokens: int
    answer: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request.

    Attributes:
        kind: `answer`, `left`, `error`, or `wrong` for text that is not the right one.
        text: the error, or the wrong text.
        hurt: whether the router that was asked was killed meanwhile: only then may a connection break.
        seconds: until then.
    """

    kind: str
    text: str
    hurt: bool
    seconds: float


class Crowd:
    """Clients in threads; made by `crowd(...)`. They ask a router until they are given another."""

    def __init__(self, router: Service, asks: Sequence[Ask], seed: int, leaving: float) -> None:
        self.outcomes: list[Outcome] = []
        self._router: Service | None = router
        self._asks = asks
        self._seed = seed
        self._leaving = leaving
        self._pieces = 0
        self._asking = 0
        self._held = self._ended = False
        self._changed = threading.Condition()

    def hold(self) -> None:
        """Begin no more requests, and return when the last has ended."""
        with self._changed:
            self._held = True
            self._wait(lambda: self._asking == 0, "requests are still under way")

    def go_on(self) -> None:
        """Begin requests again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def until_more(self, pieces: int) -> None:
        """Return when so many more pieces of answers have come."""
        with self._changed:
            wanted = self._pieces + pieces
            self._wait(lambda: self._pieces >= wanted, "the answers stand still")

    def turn_to(self, router: Service | None) -> None:
        """Ask another router from now on; None when theirs is about to be killed, which they then may feel."""
        with self._changed:
            self._router = router
            self._changed.notify_all()

    def end(self) -> None:
        """Let the clients end after their requests."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def run(self, number: int) -> None:
        """Be one client until the end."""
        chance = random.Random(f"{self._seed} {number}")
        while (router := self._next_router()) is not None:
            ask, begun = chance.choice(self._asks), time.monotonic()
            try:
                if chance.random() < self._leaving:
                    kind, text = self._leave(router, ask, chance.randrange(MOST_PIECES_BEFORE_LEAVING))
                else:
                    kind, text = self._read(router, ask)
            finally:
                with self._changed:
                    self._asking -= 1
                    self._changed.notify_all()
            self.outcomes.append(Outcome(kind, text, router is not self._router, time.monotonic() - begun))

    def _next_router(self) -> Service | None:
        """Wait until a request may begin and count it; None at the end."""
        with self._changed:
            self._wait(lambda: self._ended or not (self._held or self._router is None), "nobody lets the clients ask")
            if self._ended:
                return None
            self._asking += 1
            return self._router

    def _read(self, router: Service, ask: Ask) -> tuple[str, str]:
        text, finish = "", None
        try:
            with openai.OpenAI(
                base_url=f"{router.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE
            ) as client:
                stream = client.completions.create(
                    model=MODEL, prompt=ask.prompt, max_tokens=ask.tokens, temperature=0, stream=True
                )
                for piece in stream:
                    text, finish = text + piece.choices[0].text, piece.choices[0].finish_reason
                    self._came()
        except Exception as error:  # also what the client's HTTP library raises in the middle of a stream
            kind = "error" if ask.answer.startswith(text) else "wrong"
            return kind, f"{type(error).__name__}: {error}"
        if text == ask.answer and finish == "length":
            return "answer", ""
        return "wrong", f"{text!r}, finish {finish}, instead of {ask.answer!r}"

    def _leave(self, router: Service, ask: Ask, pieces: int) -> tuple[str, str]:
        """Ask and leave: with 0 pieces as good as at once, else after so many of its own at most."""
        try:
            with ask_by_socket(router, ask.prompt, ask.tokens) as one:
                one.settimeout(0.05 if pieces == 0 else PATIENCE)
                for _ in range(max(1, pieces)):
                    if not one.recv(256):
                        break
                    self._came()
        except TimeoutError:
            return ("left", "") if pieces == 0 else ("error", "TimeoutError: nothing came")
        except OSError as error:
            return "error", f"{type(error).__name__}: {error}"
        return "left", ""

    def _came(self) -> None:
        with self._changed:
            self._pieces += 1
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], text: str) -> None:
        assert self._changed.wait_for(condition, PATIENCE), f"{text} after {PATIENCE:g} s"


@contextmanager
def crowd(router: Service, asks: Sequence[Ask], *, clients: int, seed: int, leaving: float) -> Iterator[Crowd]:
    """Let clients ask within the scope; a share `leaving` of the requests is left in the middle."""
    made = Crowd(router, asks, seed, leaving)
    with ThreadPoolExecutor(clients) as pool:
        runs: list[Future[None]] = [pool.submit(made.run, number) for number in range(clients)]
        try:
            yield made
        finally:
            made.end()
    for run in runs:
        run.result()
