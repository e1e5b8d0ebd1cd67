"""A blocking fabric behind the calls of an async one: each await blocks a thread of its own. For the conformance suite.

Submissions run on the event loop's thread, waits on worker threads, several at once. So the checks of the suite, which
are async, judge `asyncfabric.blocking` from many threads.
"""

# mypy: disable-error-code="override"
# What blocks in the base classes is awaited here: that is what this file is for.

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, cast

from anyio import CancelScope, CapacityLimiter
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled
from anyio.to_thread import run_sync

from asyncfabric import (
    Fabric,
    FabricAddress,
    FabricConfig,
    Message,
    Peer,
    PeerGroup,
    TransferResult,
    WarmReport,
    blocking,
)
from asyncfabric._api.counter import CountProgress
from asyncfabric.types import AccessMode

if TYPE_CHECKING:
    from types import TracebackType

    from asyncfabric._api.opening import EngineFactory

_Result = TypeVar("_Result")
_SLICE_S = 0.01
"""How long a thread waits before the task looks whether it was cancelled."""


def open_threaded(
    config: FabricConfig | None = None, *, engine_factory: EngineFactory | None = None
) -> AbstractAsyncContextManager[Fabric]:
    """Return the opening of a blocking fabric that looks like an async one, for `FabricFactory(open=...)`.

    A task that is cancelled while it awaits a transfer cancels it and drains it, as with an async fabric. Waits that
    take a deadline are made of short ones, so that they end when their task is cancelled.
    """
    return cast(AbstractAsyncContextManager[Fabric], _Opening(config, engine_factory))


class _Opening(AbstractAsyncContextManager["_Fabric"]):
    def __init__(self, config: FabricConfig | None, engine_factory: EngineFactory | None) -> None:
        self._opening = blocking.open_fabric(config, engine_factory=engine_factory)

    async def __aenter__(self) -> _Fabric:
        fabric = self._opening.__enter__()
        fabric.__class__ = _Fabric  # the same object; its calls are awaited from here on
        fabric._transfer_type = _Awaited
        return cast(_Fabric, fabric)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            await _in_thread(partial(self._opening.__exit__, kind, value, traceback))


class _Awaited(blocking.Transfer):
    """A transfer that is awaited: whoever awaits it waits in a thread."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, TransferResult]:
        return self._awaited().__await__()

    async def _awaited(self) -> TransferResult:
        if self.done:
            await checkpoint_if_cancelled()
            return self.result()
        try:
            return await _in_thread(self.wait, abandon=True)
        except BaseException:
            if not self.done:
                self.cancel()
                with CancelScope(shield=True):
                    await _in_thread(partial(self._dispatcher.wait_for, self, None))
            raise


class _Region(blocking.Region):
    async def revoke(self) -> None:
        await _in_thread(super().revoke)

    async def release(self) -> None:
        await _in_thread(super().release)


class _Counter(blocking.ImmCounter):
    __slots__ = ()

    async def wait(self, target: SupportsIndex, peers: Iterable[Peer] | PeerGroup | None = None) -> int:
        if self.value >= target.__index__():
            await checkpoint_if_cancelled()
        return await _in_slices(partial(super().wait, target, peers, deadline=_SLICE_S))

    def __aiter__(self) -> AsyncIterator[int]:
        return CountProgress(self)


class _Messages(blocking.MessageStream):
    __slots__ = ()

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Message:
        return await _in_slices(partial(self.receive, _SLICE_S))


class _Word(blocking.WatchWord):
    __slots__ = ()

    async def __aenter__(self) -> _Word:
        self.__enter__()
        return self

    async def __aexit__(self, *about: Any) -> None:
        self.__exit__(*about)

    def __aiter__(self) -> _Word:
        return self

    async def __anext__(self) -> tuple[int, int]:
        return await _in_slices(partial(self.wait, _SLICE_S))


class _Fabric(blocking.Fabric):
    _transfer_type = _Awaited
    _region_type = _Region
    _counter_type = _Counter

    async def register(self, buffer: object, access: AccessMode = "read-write") -> blocking.Region:
        return await _in_thread(partial(super().register, buffer, access))

    async def allocate(
        self, length_bytes: SupportsIndex, device: str | int = "cpu", access: AccessMode = "read-write"
    ) -> blocking.Region:
        return await _in_thread(partial(super().allocate, length_bytes, device, access))

    async def connect(self, address: FabricAddress | bytes) -> Peer:
        return await _in_thread(partial(super().connect, address))

    async def disconnect(self, peer: Peer) -> None:
        await _in_thread(partial(super().disconnect, peer))

    async def warm(self, addresses: Iterable[FabricAddress | bytes]) -> list[WarmReport]:
        return await _in_thread(partial(super().warm, addresses))

    def messages(self) -> _Messages:
        return _Messages(self._dispatcher, self._peers)

    async def open_counter(self, imm: SupportsIndex) -> blocking.ImmCounter:
        return await _in_slices(partial(super().open_counter, imm, deadline=_SLICE_S))

    def watch(self) -> _Word:
        return _Word(self._dispatcher)

    async def wait_writable(self) -> None:
        await _in_slices(partial(super().wait_writable, deadline=_SLICE_S))

    async def aclose(self) -> None:
        await _in_thread(super().close)


async def _in_thread(call: Callable[[], _Result], *, abandon: bool = False) -> _Result:
    # A limiter of its own: each wait may need that of another thread to end first.
    return await run_sync(call, abandon_on_cancel=abandon, limiter=CapacityLimiter(1))


async def _in_slices(call: Callable[[], _Result]) -> _Result:
    while True:
        try:
            return await _in_thread(call)
        except TimeoutError:
            await checkpoint()
