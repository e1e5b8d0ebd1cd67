"""Who computes what in the next pass: continuous batching as a table of requests, without clock, thread or event loop.

Requests join a queue in order, get all their pages at once (so a running request never waits for pages), are prefilled
in chunks beside the decoding ones, and leave between passes. One task uses a scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from asyncfabric.errors import BusyError
from asyncfabric_services.runner.batch import TokenSpan
from asyncfabric_services.runner.choice import Chooser
from asyncfabric_services.runner.page_supply import PageSupply
from asyncfabric_services.runner.sampling import Sampling


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """One request in the scheduler.

    A decode node that leased pages itself and received the prompt's keys and values gives `table` and `computed`, and
    calls `take` with the logits that it received, before it joins; such pages stay the caller's.

    Attributes:
        tokens: the prompt, then the answer so far.
        max_tokens: the longest answer.
        sampling: how tokens are chosen.
        end_tokens: tokens that end the answer and are not part of it.
        table: its pages; empty while it waits for pages of the scheduler.
        computed: tokens whose keys and values are in the pages.
        finished: whether the answer is complete.
        own_pages: whether its pages were given and not leased by the scheduler.
        leaving: whether it only waits for the pass in progress; it is in no later one.
    """

    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    table: list[int] = field(default_factory=list)
    computed: int = 0
    finished: bool = False
    leaving: bool = False
    own_pages: bool = field(init=False)
    chooser: Chooser = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        """Check that there is something to do."""
        if not self.tokens or self.max_tokens < 1:
            raise ValueError(f"a request needs a prompt and an answer, got {len(self.tokens)} and {self.max_tokens}")
        if not 0 <= self.computed <= len(self.tokens) or (self.computed and not self.table):
            raise ValueError(f"computed must be in 0..{len(self.tokens)}, with pages, got {self.computed}")
        self.own_pages = bool(self.table)
        self.chooser = Chooser(self.sampling)
        self.last = len(self.tokens) + self.max_tokens

    def take(self, logits: torch.Tensor) -> int | None:
        """Choose the next token; None when the answer ended before it."""
        token = self.chooser.choose(logits)
        if token in self.end_tokens:
            self.finished = True
            return None
        self.tokens.append(token)
        self.finished = len(self.tokens) == self.last
        return token


Plan = list[tuple[ScheduledRequest, TokenSpan]]


class Scheduler:
    """The requests of one runner and their pages."""

    def __init__(
        self, supply: PageSupply, *, page_tokens: int, chunk_tokens: int, most_running: int, most_waiting: int
    ) -> None:
        """Take pages from `supply`; a pass has at most `chunk_tokens` of prompts and `most_running` requests."""
        for name, value in (("chunk_tokens", chunk_tokens), ("most_running", most_running)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._supply = supply
        self._page_tokens = page_tokens
        self._chunk_tokens = chunk_tokens
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._running: list[ScheduledRequest] = []
        self._waiting: deque[ScheduledRequest] = deque()

    @property
    def running(self) -> int:
        """Return how many requests have pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return how many requests wait for pages or for a place."""
        return len(self._waiting)

    def join(self, member: ScheduledRequest) -> None:
        """Queue a request; BusyError when the queue is full, ValueError when the pool can never hold it."""
        needed = self._pages(member)
        if member.own_pages and len(member.table) < needed:
            raise ValueError(f"{needed} pages are needed, {len(member.table)} were given")
        if needed > self._supply.pages and not member.own_pages:
            raise ValueError(
                f"{len(member.tokens)} prompt tokens and {member.max_tokens} to answer need {needed} pages, "
                f"the pool has {self._supply.pages}"
            )
        self._waiting.append(member)
        self._admit()
        if len(self._waiting) > self._most_waiting:
            self._waiting.pop()  # in order, so the last one is this one
            raise BusyError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, which is the most",
                remedy="try again in a moment",
            )

    def leave(self, member: ScheduledRequest) -> None:
        """Forget a request and release its pages; only between passes, for a pass writes to them."""
        if member in self._waiting:
            self._waiting.remove(member)
        if member in self._running:
            self._running.remove(member)
        if not member.own_pages:
            self._supply.release(member.table)
            member.table = []
        self._admit()

    def plan(self) -> Plan:
        """Return the spans of the next pass; an empty plan when nothing is to be done."""
        chosen: Plan = []
        budget = self._chunk_tokens
        for member in self._running:
            left = len(member.tokens) - member.computed
            if member.finished or member.leaving or left == 0:
                continue
            count = 1 if left == 1 else min(left, budget)  # a decoding request never waits for others' prompts
            if count:
                new = member.tokens[member.computed : member.computed + count]
                chosen.append((member, TokenSpan(new, member.computed, member.table)))
                budget -= count if left > 1 else 0
        return chosen

    def complete(self, plan: Plan, logits: torch.Tensor) -> list[tuple[ScheduledRequest, int | None]]:
        """Record a finished pass; returns the members that were due a token, with it or None at the answer's end."""
        due: list[tuple[ScheduledRequest, int | None]] = []
        for (member, span), row in zip(plan, logits, strict=True):
            member.computed = span.end
            if span.end == len(member.tokens):
                due.append((member, member.take(row)))
        return due

    def members(self) -> Sequence[ScheduledRequest]:
        """Return all requests, running and waiting."""
        return [*self._running, *self._waiting]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._most_running:
            member = self._waiting[0]
            if not member.own_pages:
                needed = self._pages(member)
                if needed > self._supply.free:
                    return  # in order: a long request must not starve behind short ones
                member.table = self._supply.lease(needed)
            self._running.append(self._waiting.popleft())

    def _pages(self, member: ScheduledRequest) -> int:
        return -(-(member.last - 1) // self._page_tokens)  # the last token is never fed back
