"""open_fabric: how a blocking fabric begins, and how leaving its `with` ends it.

Any thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from asyncfabric._api.closing import close_fabric
from asyncfabric._api.opening import Beginning, EngineFactory
from asyncfabric._bridge.threads import ThreadDispatcher
from asyncfabric.blocking.fabric import Fabric
from asyncfabric.config import FabricConfig

if TYPE_CHECKING:
    from types import TracebackType


def open_fabric(
    config: FabricConfig | None = None, *, engine_factory: EngineFactory | None = None
) -> AbstractContextManager[Fabric]:
    """Open a fabric, that is start its engine and open its rails: `with blocking.open_fabric() as fabric`.

    Leaving the block drains every submitted transfer and closes; what has not begun to leave within
    `config.drain_deadline`, as messages that a peer does not take, ends with TransferError. Leaving it by an
    exception stops posting what is unposted, drains what is posted (bounded by `config.drain_deadline`) and closes,
    then the exception goes on. Ctrl-C obeys the same rule. Where a block does not fit, hold the fabric in a
    `contextlib.ExitStack`.

    Args:
        config: how to open it; None opens with the defaults of FabricConfig.
        engine_factory: makes the engine, for tests: `asyncfabric.testing.FakeEngine`. None takes the compiled engine.

    Raises:
        TypeError: config is no FabricConfig.
        DeviceError: a rail cannot be opened, or the compiled engine is not there.
    """
    return _Opening(Beginning.of(config, engine_factory))


class _Opening(AbstractContextManager[Fabric]):
    """One `with open_fabric()`; a class, since a generator could be interrupted between two of its lines."""

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._dispatcher: ThreadDispatcher | None = None

    def __enter__(self) -> Fabric:
        if self._dispatcher is not None:
            raise RuntimeError("this open_fabric() was entered already; call it once for each `with`")
        engine = self._beginning.engine()
        try:
            self._dispatcher = ThreadDispatcher(engine)
            return Fabric(self._dispatcher, self._beginning.config, self._beginning.resolver)
        except BaseException:
            engine.close()
            raise

    async def __aenter__(self) -> NoReturn:
        raise TypeError("blocking.open_fabric() is entered by `with`; asyncfabric.open_fabric() by `async with`")

    async def __aexit__(self, *_: object) -> None:
        """Never called; without it `async with` would not come to the sentence above."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        dispatcher = self._dispatcher
        assert dispatcher is not None, "entered"
        try:
            dispatcher.run(close_fabric(dispatcher, drain_all=kind is None))
        except KeyboardInterrupt:
            if not dispatcher.closing:  # Ctrl-C before the first line of the closing
                dispatcher.run(close_fabric(dispatcher, drain_all=False))
            raise
