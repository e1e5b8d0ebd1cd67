"""The third adapter: threads without an event loop wait for completions themselves, by leader and followers.

Any thread. One lock for each fabric guards whatever completions touch; no thread holds it while it blocks. Of the
threads that wait one leads: it sleeps on the completion fd of the engine, hands out what comes and wakes the others,
each by a lock of its own. Whoever leaves (its wait is over, its deadline passed, Ctrl-C) names the next leader under
the lock. While nobody waits nothing runs: completions stay in the ring for the next call, as with event loops.

The calls of `asyncfabric._api` that wait are coroutines; run() takes them from wait to wait, each step under the lock.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import CORO_CLOSED, getcoroutinestate
from math import ceil
from threading import Lock, RLock, current_thread, main_thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from asyncfabric._bridge import faults
from asyncfabric._bridge.dispatcher import CompletionDispatcher
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.loop_adapter import Waiter, is_ready
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from asyncfabric._bridge.engine import Engine
    from asyncfabric._bridge.pending import Pending

_Result = TypeVar("_Result")


class _Step(NamedTuple):
    """What a coroutine asks of run(): to block until a waiter is ready; for None to hold Ctrl-C back from its steps."""

    waiter: Waiter | None
    shielded: bool = False

    def __await__(self) -> Generator[_Step, None, None]:
        yield self


class _Nothing:
    """Awaiting it takes no time."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_NOTHING = _Nothing()


class ThreadDispatcher(CompletionDispatcher):
    """The completion dispatcher of a fabric of threads; whoever reads or changes what it keeps holds `lock`."""

    lock: AbstractContextManager[object]
    adapter: ThreadAdapter
    unclosed = "a fabric was never closed: leave its `with blocking.open_fabric()`, or call fabric.close()"

    def __init__(self, engine: Engine) -> None:
        self.lock = RLock()
        super().__init__(engine)
        self.thread = 0

    def check_thread(self) -> None:
        """Let every thread pass."""

    def check_loop(self) -> None:
        """Let every thread pass."""

    def drain(self) -> None:
        """Take every completion that is there and hand it to its sink. Never waits for one."""
        with self.lock:
            if not self.closed and not self.draining:
                self.dispatch()

    def assist(self) -> None:
        """Bring on what is under way: for a thread that polls, drains next, and leaves its core to no other thread."""
        if not self.closed:
            try:
                self.engine.assist()
            except EngineStatusError:
                pass  # closed by another thread

    def look(self) -> bool:
        """Take what is there; while nothing is, bring on what is under way, and take what came of that.

        Returns whether anything was taken.
        """
        if self.closed:
            return False
        try:
            came = self.engine.look()
        except EngineStatusError:
            return False  # closed by another thread
        if came:
            self.drain()
        return came

    def waiting(self) -> list[Waiting]:
        """Return a line for each wait of this fabric, oldest first."""
        with self.lock:
            return super().waiting()

    def wait_for(self, call: Pending, until: float | None) -> None:
        """Return when a call has ended; `until` is on the monotonic clock.

        Raises:
            TimeoutError: it is later than `until`; the call goes on.
        """
        with self.lock:
            self.drain()
            if call.ended:
                return
            waiter = call.park()
        try:
            self.adapter.block(waiter, until)
        except BaseException as interrupt:
            with self.lock:
                call.leave(waiter)
            if call.ended and isinstance(interrupt, TimeoutError):
                return
            raise

    def run(self, call: Coroutine[_Step, None, _Result], until: float | None = None) -> _Result:
        """Return what a coroutine of `asyncfabric._api` returns; the calling thread blocks where it waits.

        Ctrl-C and a passed `until` are thrown into it where it waits, as cancellations of event loops are.
        """
        thrown: BaseException | None = None
        held_back = False
        while True:
            try:
                while True:
                    if held_back:
                        with _without_ctrl_c():
                            step = self._advance(call, thrown)
                    else:
                        step = self._advance(call, thrown)
                    thrown = None
                    if step.waiter is None:
                        held_back = True
                    else:
                        self.adapter.block(step.waiter, None if step.shielded else until)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except BaseException as interrupt:
                if getcoroutinestate(call) == CORO_CLOSED:  # the call itself ended so
                    raise
                thrown = interrupt

    def _advance(self, call: Coroutine[_Step, None, Any], thrown: BaseException | None) -> _Step:
        with self.lock:
            return call.send(None) if thrown is None else call.throw(thrown)

    def close_in_child(self) -> None:
        """Mark it as closed; the locks may be held by threads that the copy does not have."""
        super().close_in_child()
        self.lock = RLock()
        self.adapter.close_in_child()

    def _open_adapter(self) -> ThreadAdapter:
        return ThreadAdapter(self)


class ThreadAdapter:
    """Threads that wait for one engine. wake() and close() are called under the lock of the dispatcher."""

    _fds: tuple[int, ...] = ()

    def __init__(self, dispatcher: ThreadDispatcher) -> None:
        self._dispatcher = dispatcher
        self._engine = dispatcher.engine
        self._leader: Waiter | None = None
        self._asleep = False  # the leader holds no lock: whoever makes it ready has to ring
        self._rung = False
        self._followers: dict[Waiter, None] = {}
        self._closed = False
        # A copy of the engine's: the leader of a fabric that another thread closes must not sleep on a foreign fd.
        self._fds = (os.dup(dispatcher.engine.completion_fd()), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)

    def is_here(self) -> bool:
        """Return True: every thread may call."""
        return True

    def checkpoint(self) -> Awaitable[None]:
        """Return what takes no time: threads are cancelled by nobody."""
        return _NOTHING

    async def wait(self, waiter: Waiter) -> None:
        """Have run() block until the waiter is ready.

        Cancellation: raises TimeoutError at the deadline of the call, KeyboardInterrupt at once.
        """
        if not waiter.ready:
            await _Step(waiter)

    async def wait_shielded(self, waiter: Waiter) -> BaseException | None:
        """Have run() block until the waiter is ready, whatever the deadline; Ctrl-C is kept and returned."""
        interrupt: BaseException | None = None
        while not waiter.ready:
            try:
                await _Step(waiter, shielded=True)
            except KeyboardInterrupt as thrown:
                interrupt = thrown
        return interrupt

    async def uninterrupted(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run `function` so that Ctrl-C only interrupts it where it waits."""
        await _Step(None)
        return await function()

    def block(self, waiter: Waiter, until: float | None) -> None:
        """Return when the waiter is ready. Without the lock.

        Raises:
            TimeoutError: it is later than `until`.
            ClosedError: the fabric is closed.
        """
        try:
            while not waiter.ready:
                with self._dispatcher.lock:
                    if is_ready(waiter):
                        return
                    if self._dispatcher.closed:
                        raise faults.closed("the fabric")
                    leads = self._leader is None
                    if leads:
                        self._leader, self._asleep = waiter, True
                    else:
                        waiter.handle = _held_lock()
                        self._followers[waiter] = None
                if leads:
                    self._lead(waiter, until)
                else:
                    self._follow(waiter, until)
        finally:
            interrupt: KeyboardInterrupt | None = None
            while True:
                try:
                    self._leave(waiter)
                    break
                except KeyboardInterrupt as thrown:  # Ctrl-C just here: those that stay need a leader first
                    interrupt = thrown
            if interrupt is not None:
                raise interrupt

    def wake(self, waiter: Waiter) -> None:
        """Set the waiter ready and wake its thread."""
        waiter.ready = True
        if waiter in self._followers:
            _release(waiter.handle)
            del self._followers[waiter]
        elif waiter is self._leader and self._asleep and not self._rung:
            os.eventfd_write(self._fds[1], 1)
            self._rung = True

    def close(self) -> None:
        """Give the descriptors back; the sinks wake whoever waits, and a leader that still sleeps on them does it."""
        self._closed = True
        self._close_fds()

    def close_in_child(self) -> None:
        """Forget the threads that a forked copy does not have."""
        self._leader = None
        self._followers.clear()
        self.close()

    def __del__(self) -> None:
        self._leader = None
        self._close_fds()

    def _lead(self, waiter: Waiter, until: float | None) -> None:
        """Sleep on the fd and hand out completions until the waiter is ready, or the fabric closed."""
        dispatcher = self._dispatcher
        while True:
            if self._arm():
                try:
                    self._poll.poll(None if until is None else max(0, ceil((until - monotonic()) * 1e3)))
                finally:
                    self._disarm()
            with dispatcher.lock:
                self._asleep = False
                if self._rung:
                    os.eventfd_read(self._fds[1])
                    self._rung = False
                dispatcher.drain()
                if waiter.ready or dispatcher.closed:
                    return
                if until is not None and monotonic() >= until:
                    raise TimeoutError
                self._asleep = True

    def _follow(self, waiter: Waiter, until: float | None) -> None:
        """Sleep until the waiter is ready or called to lead."""
        left = -1 if until is None else max(0.0, until - monotonic())
        if not waiter.handle.acquire(timeout=left) and not waiter.ready:
            raise TimeoutError

    def _leave(self, waiter: Waiter) -> None:
        """Name another leader if this one goes: those that stay would sleep for ever."""
        with self._dispatcher.lock:
            self._followers.pop(waiter, None)
            if self._leader is waiter:
                self._leader, self._asleep = None, False
                if self._closed:
                    self._close_fds()
            if self._leader is None and self._followers:
                follower = next(iter(self._followers))
                _release(follower.handle)
                del self._followers[follower]

    def _arm(self) -> bool:
        try:
            return self._engine.arm()
        except EngineStatusError:
            return False  # closed by another thread, which has set the waiter ready

    def _disarm(self) -> None:
        try:
            self._engine.disarm()
        except EngineStatusError:
            pass  # as above

    def _close_fds(self) -> None:
        if self._leader is None:
            for fd in self._fds:
                os.close(fd)
            self._fds = ()


def _held_lock() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


def _release(lock: Lock) -> None:
    if lock.locked():  # or Ctrl-C came after the release, and this is the second time
        lock.release()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Hold SIGINT back for a few lines, if this is the thread that would be interrupted."""
    usual = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
    if not callable(usual):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])
