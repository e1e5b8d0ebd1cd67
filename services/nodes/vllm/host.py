"""vLLM's asynchronous engine on an asyncio loop of its own thread, used from trio.

trio runs the node; vLLM wants asyncio. A request is a task of that loop; its outputs come by trio's thread-safe queue.
When a scope of `generate` is left the task has ended, so vLLM has been ordered to abort what was not complete.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from asyncfabric import BrokenError
from asyncfabric_services.nodes.vllm.translation import trace_headers

LOOK_S = 0.1  # between two looks whether the engine's process lives
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What vLLM gave at once: tokens after the ones before, and how it ended if it did."""

    tokens: list[int]
    finish: str | None
    stopped_by: object
    transfer: dict[str, Any] | None


@dataclass(eq=False)
class _Job:
    """One request: its task on the asyncio side, its outputs and its end on trio's."""

    send: trio.MemorySendChannel[EngineOutput]
    ended: trio.Event = field(default_factory=trio.Event)
    error: BaseException | None = None
    task: asyncio.Task[None] | None = None


class EngineHost:
    """A started engine. `failed` is set when it is dead for good.

    Attributes:
        engine: vLLM's AsyncLLM; its attributes may be read from any thread, its methods run on its own.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Make the engine by `make()`, on the loop's thread, in `open_host`."""
        self.engine: Any = None
        self.failed = trio.Event()
        self.reason = ""
        self._make = make
        self._trio = trio.lowlevel.current_trio_token()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._error: BaseException | None = None
        self._started, self._ended = trio.Event(), trio.Event()

    @asynccontextmanager
    async def generate(
        self, prompt: list[int], sampling: Any, name: str, context: str = ""
    ) -> AsyncIterator[AsyncIterator[EngineOutput]]:
        """Run a request within the scope, under a trace context that vLLM's own spans go on from.

        Raises ValueError for what vLLM refuses, BrokenError when it is dead.

        Cancellation: vLLM aborts the request before the scope is left.
        """
        self._check()
        send, receive = trio.open_memory_channel[EngineOutput](math.inf)  # bounded by max_tokens
        job = _Job(send)
        self._loop.call_soon_threadsafe(self._begin, job, prompt, sampling, name, trace_headers(context))
        try:
            yield self._outputs(job, receive)
        finally:
            with trio.CancelScope(shield=True):
                if not job.ended.is_set():
                    self._loop.call_soon_threadsafe(self._cancel, job)
                    await job.ended.wait()
                receive.close()

    async def _outputs(
        self, job: _Job, receive: trio.MemoryReceiveChannel[EngineOutput]
    ) -> AsyncIterator[EngineOutput]:
        async for output in receive:
            yield output
        if isinstance(job.error, ValueError):
            raise ValueError(str(job.error)) from job.error
        if job.error is not None:
            raise BrokenError(f"vLLM failed: {job.error!r}", remedy="see the log of this node") from job.error

    def _check(self) -> None:
        if self.failed.is_set():
            raise BrokenError(f"vLLM's engine is dead: {self.reason}", remedy="ask another node")

    def _begin(self, job: _Job, *request: Any) -> None:
        job.task = self._loop.create_task(self._pump(job, *request))
        job.task.add_done_callback(lambda task: self._trio.run_sync_soon(self._finish, job, task))

    def _cancel(self, job: _Job) -> None:
        if job.task is not None:
            job.task.cancel()

    def _finish(self, job: _Job, task: asyncio.Task[None]) -> None:
        job.error = asyncio.CancelledError("aborted") if task.cancelled() else task.exception()
        job.send.close()
        job.ended.set()

    async def _pump(
        self, job: _Job, prompt: list[int], sampling: Any, name: str, traced: dict[str, str] | None
    ) -> None:
        outputs = self.engine.generate({"prompt_token_ids": prompt}, sampling, name, trace_headers=traced)
        try:
            async for output in outputs:
                one = output.outputs[0]
                found = EngineOutput(list(one.token_ids), one.finish_reason, one.stop_reason, output.kv_transfer_params)
                self._trio.run_sync_soon(job.send.send_nowait, found)
        finally:
            await outputs.aclose()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # whatever vLLM raises at its start is the node's error
            self._error = error
        self._trio.run_sync_soon(self._end)

    def _end(self) -> None:
        self._fail(repr(self._error) if self._error else "it was stopped")
        self._started.set()
        self._ended.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = self._make()
        self._trio.run_sync_soon(self._started.set)
        try:
            while not self._stop.is_set():
                if self.engine.errored:
                    self._trio.run_sync_soon(self._fail, "its process ended")
                    await self._stop.wait()
                try:
                    await asyncio.wait_for(self._stop.wait(), LOOK_S)
                except TimeoutError:
                    continue
        finally:
            self.engine.shutdown()

    def _fail(self, reason: str) -> None:
        if not self.failed.is_set():
            self.reason = reason
            self.failed.set()


@asynccontextmanager
async def open_host(make: Callable[[], Any]) -> AsyncIterator[EngineHost]:
    """Start the engine that `make()` gives on a thread of its own; raises what it raises.

    Cancellation: a start is waited for; the engine is shut down and its process has ended.
    """
    host = EngineHost(make)
    thread = threading.Thread(target=host._run, name="vllm", daemon=True)
    thread.start()
    try:
        with trio.CancelScope(shield=True):  # vLLM's start cannot be interrupted
            await host._started.wait()
        if host._error is not None:
            raise host._error
        yield host
    finally:
        with trio.CancelScope(shield=True):
            if not host._ended.is_set():
                host._loop.call_soon_threadsafe(host._stop.set)
                await host._ended.wait()
