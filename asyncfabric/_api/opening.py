"""open_fabric: how a fabric begins, and how leaving its `async with` ends it.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from asyncfabric._api.closing import close_fabric
from asyncfabric._api.fabric import Fabric
from asyncfabric._api.registering import Resolver
from asyncfabric._bridge import faults
from asyncfabric._bridge.buffers import resolve_buffer
from asyncfabric._bridge.dispatcher import CompletionDispatcher
from asyncfabric._bridge.engine import Engine, EngineStatusError
from asyncfabric._bridge.native import open_native_engine, resolve_native_buffer
from asyncfabric.config import FabricConfig

if TYPE_CHECKING:
    from types import TracebackType

EngineFactory = Callable[[FabricConfig], Engine]


def open_fabric(
    config: FabricConfig | None = None, *, engine_factory: EngineFactory | None = None
) -> AbstractAsyncContextManager[Fabric]:
    """Open a fabric, that is start its engine and open its rails: `async with af.open_fabric() as fabric`.

    Leaving the block drains every submitted transfer and closes; what has not begun to leave within
    `config.drain_deadline`, as messages that a peer does not take, ends with TransferError. Leaving it by an
    exception or a cancellation stops posting what is unposted, drains what is posted (shielded, bounded by
    `config.drain_deadline`) and closes, then the exception goes on. Ctrl-C obeys the same rule.

    Args:
        config: how to open it; None opens with the defaults of FabricConfig.
        engine_factory: makes the engine, for tests: `asyncfabric.testing.FakeEngine`. None takes the compiled engine.

    Raises:
        TypeError: config is no FabricConfig.
        DeviceError: a rail cannot be opened, or the compiled engine is not there.

    Cancellation: opening does not wait; closing is described above.
    """
    return _Opening(Beginning.of(config, engine_factory))


class Beginning(NamedTuple):
    """What a fabric begins with: its configuration, what makes its engine, what finds the memory of a buffer."""

    config: FabricConfig
    engine_factory: EngineFactory
    resolver: Resolver

    @classmethod
    def of(cls, config: FabricConfig | None, engine_factory: EngineFactory | None) -> Beginning:
        """Return the checked arguments of `open_fabric`; raises TypeError for a config that is none."""
        if config is not None and not isinstance(config, FabricConfig):
            raise TypeError(f"config must be a FabricConfig, got {type(config).__name__}")
        if config is None:
            config = FabricConfig()
        if engine_factory is None:
            return cls(config, open_native_engine, resolve_native_buffer)
        return cls(config, engine_factory, resolve_buffer)

    def engine(self) -> Engine:
        """Return the engine, started; raises DeviceError when a rail cannot be opened."""
        try:
            return self.engine_factory(self.config)
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall("opening a fabric")) from None


class _Opening(AbstractAsyncContextManager[Fabric]):
    """One `async with open_fabric()`; a class, since a generator could be interrupted between two of its lines."""

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._dispatcher: CompletionDispatcher | None = None

    async def __aenter__(self) -> Fabric:
        if self._dispatcher is not None:
            raise RuntimeError("this open_fabric() was entered already; call it once for each `async with`")
        engine = self._beginning.engine()
        try:
            self._dispatcher = CompletionDispatcher(engine)
            return Fabric(self._dispatcher, self._beginning.config, self._beginning.resolver)
        except BaseException:
            engine.close()
            raise

    def __enter__(self) -> NoReturn:
        raise TypeError("open a fabric by `async with open_fabric() as fabric`, not by `with`")

    def __exit__(self, *_: object) -> None:
        """Never called; without it `with` would not come to the sentence above."""

    def __await__(self) -> NoReturn:
        raise TypeError("open a fabric by `async with open_fabric() as fabric`, not by `await`")

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await close_fabric(cast(CompletionDispatcher, self._dispatcher), drain_all=kind is None)
