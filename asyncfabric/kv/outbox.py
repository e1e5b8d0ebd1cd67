"""KvOutbox: the source's end of the protocol. Takes offers, runs a handler for each, stops and confirms when asked.

Runs on the event loop's thread; each accepted offer is a task with a scope of its own, so that cancelling one touches
nothing else. The rules are those of SourceMachine.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from asyncfabric import Fabric, FabricAddress, FabricError
from asyncfabric._groups import beside
from asyncfabric._notice import Notice
from asyncfabric.kv.channel import KvChannel, member_name
from asyncfabric.kv.loss import PeerLoss
from asyncfabric.kv.messages import MAX_TEXT, KvCancel, KvMessage, KvOffer, KvRefused
from asyncfabric.kv.pool import KvPool
from asyncfabric.kv.protocol import SourceAction, SourceMachine
from asyncfabric.kv.stream import KvStream, open_stream

logger: logging.Logger = logging.getLogger("asyncfabric.kv")

MOST_ADDRESSES = 1024
"""Of leaseholders that are not being served; each offer carries one."""

Handler = Callable[["KvJob"], Awaitable[None]]


class KvJob:
    """One accepted offer, as the handler gets it.

    Attributes:
        offer: what was offered; `offer.body` is what the leaseholder wants done.
        since: when it came, on time.monotonic().
    """

    def __init__(self, fabric: Fabric, pool: KvPool, offer: KvOffer) -> None:
        """Not for users: handlers get it."""
        self.offer = offer
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.since: float = monotonic()
        self._fabric = fabric
        self._pool = pool
        self._streams: list[KvStream] = []

    def open_stream(self, source_pages: NDArray[np.int64]) -> AbstractAsyncContextManager[KvStream]:
        """Return the stream to the offer, from these pages of the outbox's pool; use it with `async with`."""
        return self._open(source_pages)

    @property
    def stream(self) -> KvStream | None:
        """The stream that was opened last; None before the first."""
        return self._streams[-1] if self._streams else None

    @property
    def clean(self) -> bool:
        """Whether nothing of the job can reach the target any more."""
        return all(stream.ended and stream.clean for stream in self._streams)

    @property
    def finished(self) -> bool:
        """Whether everything was delivered."""
        return any(stream.finished for stream in self._streams)

    @asynccontextmanager
    async def _open(self, source_pages: NDArray[np.int64]) -> AsyncIterator[KvStream]:
        async with open_stream(self._fabric, self._pool, self.offer, source_pages) as stream:
            self._streams.append(stream)
            yield stream


class KvOutbox:
    """Serves offers from pages of a pool; made by `async with open_outbox(...)`.

    Attributes:
        forged: messages that claim to come from somebody else; dropped and counted.
        failures: handlers that raised; reported to their leaseholders.
    """

    def __init__(self, fabric: Fabric, pool: KvPool, channel: KvChannel, handler: Handler, tasks: TaskGroup) -> None:
        """Not for users: `async with open_outbox(...)`."""
        self.forged: int = 0
        self.failures: int = 0
        self._fabric = fabric
        self._pool = pool
        self._channel = channel
        self._handler = handler
        self._tasks = tasks
        self._machine = SourceMachine()
        self._jobs: dict[tuple[int, int], KvJob] = {}
        self._addresses: dict[int, FabricAddress] = {}
        self._job_ended = Notice()
        self._draining = self._closed = False
        self._loss = PeerLoss(fabric, tasks, self._lost)

    @property
    def jobs(self) -> int:
        """Offers that are being served."""
        return len(self._jobs)

    @property
    def serving(self) -> tuple[KvJob, ...]:
        """The offers that are being served."""
        return tuple(self._jobs.values())

    def drain(self) -> None:
        """Refuse new offers from now on, for a node that is about to leave; see `drained`."""
        self._draining = True

    async def drained(self) -> None:
        """Return when no offer is being served.

        Cancellation: only this wait ends.
        """
        while self._jobs:
            await self._job_ended.wait()

    def handle(self, sender: int, message: KvMessage) -> bool:
        """Take a message of a leaseholder; returns False for one that is for the other end of the protocol."""
        if not isinstance(message, KvOffer | KvCancel):
            return False
        if self._closed:
            return True  # its leaseholder learns it from the loss of this fabric, or fences
        if sender != message.target:
            self.forged += 1
            logger.warning("fabric %016x speaks for fabric %016x; dropped", sender, message.target)
            return True
        if isinstance(message, KvOffer):
            try:
                address = FabricAddress.from_bytes(message.reply_to)
            except ValueError as error:
                logger.warning("fabric %016x offers without an address: %s", sender, error)
                self.forged += 1
                return True
            if address.incarnation != sender:
                self.forged += 1
                return True
            self._note(sender, address)
        action, reply = self._machine.receive(message)
        if isinstance(message, KvOffer) and action is SourceAction.START:
            refusal = self._refusal(message)
            if refusal is not None:
                self._machine.ended(message.target, message.lease, clean=True, complete=False, reason=refusal)
                reply = KvRefused(target=message.target, lease=message.lease, reason=refusal)
            else:
                job = KvJob(self._fabric, self._pool, message)
                self._jobs[message.target, message.lease] = job
                self._tasks.start_soon(self._run, job)
        elif action is SourceAction.STOP:
            self._jobs[message.target, message.lease].scope.cancel()
        if reply is not None:
            self._tasks.start_soon(self._send, sender, reply)
        return True

    def _note(self, target: int, address: FabricAddress) -> None:
        """Keep where to answer the leaseholders that offered last, and those that are being served."""
        self._addresses.pop(target, None)
        self._addresses[target] = address
        if len(self._addresses) > MOST_ADDRESSES:
            served = {each for each, _ in self._jobs}
            idle = next((each for each in self._addresses if each not in served), target)
            if idle != target:
                del self._addresses[idle]

    def _refusal(self, offer: KvOffer) -> str | None:
        """Return why an offer cannot be served; None when it can."""
        if self._draining:
            return "this source is draining and takes no new work; ask another"
        ours = self._pool.layout
        difference = ours.difference(offer.layout)
        if difference is not None:
            return f"the layouts differ in {difference}"
        if offer.digest != ours.digest():
            return f"the layouts differ in their digest: {ours.digest()} here, {offer.digest} there"
        if ours.pages_for(offer.tokens) > self._pool.pages:
            return (
                f"{offer.tokens} tokens need {ours.pages_for(offer.tokens)} pages, this source has {self._pool.pages}"
            )
        return None

    async def _run(self, job: KvJob) -> None:
        offer = job.offer
        reason = ""
        job.scope.deadline = anyio.current_time() + offer.remaining_ns / 1e9
        try:
            with job.scope:
                self._loss.watch(await self._fabric.connect(self._addresses[offer.target]))
                await self._handler(job)
            if job.scope.cancelled_caught:
                late = anyio.current_time() >= job.scope.deadline
                reason = "the deadline of the lease has passed" if late else "cancelled"
        except Exception as error:
            self.failures += 1
            reason = f"{type(error).__name__}: {error}"[:MAX_TEXT]
            trouble = None if isinstance(error, FabricError) else error  # the fabric's errors name where they are from
            logger.warning(
                "serving lease %d of fabric %016x failed: %s", offer.lease, offer.target, reason, exc_info=trouble
            )
        finally:
            del self._jobs[offer.target, offer.lease]
            stopped = self._machine.ended(
                offer.target, offer.lease, clean=job.clean, complete=job.finished, reason=reason or "the source ended"
            )
            self._job_ended.notify()
            if stopped is not None:
                with anyio.CancelScope(shield=True):
                    await self._send(offer.target, stopped)

    async def _send(self, target: int, message: KvMessage) -> None:
        address = self._addresses.get(target)
        if address is None:
            return
        try:
            await self._channel.send(member_name(address), message)
        except FabricError as error:
            # The leaseholder asks again or fences: it never takes silence for an answer.
            logger.info("fabric %016x did not get our %s: %s", target, type(message).__name__, error)

    def _lost(self, incarnation: int, reason: str) -> None:
        for lease in self._machine.lose(incarnation):
            logger.info("the stream to lease %d stops: %s", lease, reason)
            if (job := self._jobs.get((incarnation, lease))) is not None:
                job.scope.cancel()


@asynccontextmanager
async def open_outbox(fabric: Fabric, pool: KvPool, channel: KvChannel, handler: Handler) -> AsyncIterator[KvOutbox]:
    """Open the source's end; messages reach it through `deliver(channel, [outbox])` or `outbox.handle`.

    Args:
        fabric: the fabric of the pool.
        pool: where handlers keep the pages that they stream.
        channel: carries the messages to the leaseholders; `open_kv_channel(fabric)` makes one.
        handler: called for each accepted offer, in a task of its own; it opens the stream with `job.open_stream`.
            What it raises is reported to the leaseholder and harms no other job.

    Cancellation: jobs are cancelled, their streams drain, their leaseholders get a report; then it goes on.
    """
    async with beside() as tasks:
        outbox = KvOutbox(fabric, pool, channel, handler, tasks)
        try:
            yield outbox
        finally:
            outbox._closed = True
            outbox._loss.close()
