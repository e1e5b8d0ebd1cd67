"""Continuous batching on trio: requests join and leave between passes, each pass runs on a worker thread.

The event loop does no arithmetic, so it answers while the model computes. A request that leaves, for whatever reason,
has left the batch and given its pages back before its scope is left: a pass that already writes to them is waited for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from asyncfabric.errors import BrokenError, ClosedError
from asyncfabric_services.runner.meter import RunnerMeter
from asyncfabric_services.runner.runner import Runner
from asyncfabric_services.runner.scheduler import Plan, ScheduledRequest, Scheduler

_log = logging.getLogger(__name__)


class RunnerAnswer:
    """The tokens of one request as they come: iterate it once.

    Cancellation: of the iteration takes no token away; leave the request's scope to stop it.
    """

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[int](math.inf)  # bounded by the request's max_tokens
        self._error: Exception | None = None

    def put(self, token: int) -> None:
        """Add a token."""
        self._send.send_nowait(token)

    def end(self, error: Exception | None = None) -> None:
        """End the answer; an `error` is raised to the reader after the tokens before it."""
        self._error = self._error or error
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


class Batcher:
    """Drives one runner for all its requests."""

    def __init__(self, runner: Runner, scheduler: Scheduler, meter: RunnerMeter | None = None) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._meter = meter
        self._answers: dict[ScheduledRequest, RunnerAnswer] = {}
        self._work = trio.Event()
        self._passing: Plan = []
        self._pass_over = trio.Event()
        self._stopped = False

    async def run(self) -> None:
        """Compute passes for ever.

        Cancellation: waits for the pass in progress, then ends the remaining answers with ClosedError.
        """
        try:
            while True:
                self._passing = self._scheduler.plan()
                if self._passing:
                    await self._pass()
                else:
                    self._work = trio.Event()
                    await self._work.wait()
        finally:
            self._stopped = True
            for answer in self._answers.values():
                answer.end(ClosedError("the runner stopped while it computed this answer", remedy="ask another node"))

    @asynccontextmanager
    async def generate(self, member: ScheduledRequest) -> AsyncIterator[AsyncIterator[int]]:
        """Compute the answer to `member` within the scope; what is iterated are its tokens.

        Raises BusyError when too many wait, ValueError when the pool can never hold it, ClosedError after the end of
        `run`. An answer whose pass failed raises BrokenError from the iteration.

        Cancellation: leaving the scope takes the request out of the batch and releases its pages; it waits for the pass
        in progress, which is at most one chunk long.
        """
        if self._stopped:
            raise ClosedError("the runner has stopped", remedy="ask another node")
        self._scheduler.join(member)
        answer = self._answers[member] = RunnerAnswer()
        if member.finished:
            answer.end()  # its one token came with its pages
        self._work.set()
        try:
            yield answer
        finally:
            member.leaving = True  # or the next pass would take it along before this task runs again, and so would all
            with trio.CancelScope(shield=True):
                while any(member is passing for passing, _ in self._passing):
                    await self._pass_over.wait()
            del self._answers[member]
            self._scheduler.leave(member)
            self._work.set()  # its pages may let a waiting request start

    async def _pass(self) -> None:
        plan, started = self._passing, trio.current_time()
        self._pass_over = trio.Event()
        try:
            logits = await trio.to_thread.run_sync(self._runner.step, [span for _, span in plan])
            for member, token in self._scheduler.complete(plan, logits):
                answer = self._answers[member]
                if token is not None:
                    answer.put(token)
                if member.finished:
                    answer.end()
        except Exception as error:  # whatever the model raises harms the requests of this pass, not those to come
            _log.exception("a pass over %d requests failed", len(plan))
            for member, _ in plan:
                member.finished = True
                failure = BrokenError(
                    f"the pass that computed this answer failed: {error!r}", remedy="see the log of the runner"
                )
                self._answers[member].end(failure)
        finally:
            if self._meter is not None:
                self._meter.passed(plan, trio.current_time() - started)
            self._passing = []
            self._pass_over.set()
