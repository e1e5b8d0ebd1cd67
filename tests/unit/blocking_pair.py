"""Blocking fabrics over fake engines, threads that report how a call ended, and conditions that are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncfabric as af
from asyncfabric import blocking
from asyncfabric.testing import FakeEngine, FakeNetwork

LENGTH = 1 << 16
SOON_S = 20.0


@dataclass
class Pair:
    """A writer, a reader, the network between them, and memory on both sides."""

    network: FakeNetwork
    writer: blocking.Fabric
    reader: blocking.Fabric
    source: blocking.Region
    target: blocking.Region
    key: af.RegionKey

    @property
    def engine(self) -> Any:
        """The engine of the writer."""
        return self.writer._dispatcher.engine


class HookedEngine(FakeEngine):
    """A fake engine whose arm() runs what a test puts before and after it, once, in the thread that is to sleep."""

    before_arm: Callable[[], None] | None = None
    after_arm: Callable[[], None] | None = None

    def arm(self) -> bool:
        """Arm, between the two hooks."""
        before, self.before_arm = self.before_arm, None
        if before is not None:
            before()
        armed = super().arm()
        if armed:
            after, self.after_arm = self.after_arm, None
            if after is not None:
                after()
        return armed


@contextmanager
def open_pair(config: af.FabricConfig | None = None, **network: Any) -> Iterator[Pair]:
    """Open two fabrics; the network begins to hold only after the set-up."""
    hold = network.pop("hold", False)
    net = FakeNetwork(**network)

    def engine(wanted: af.FabricConfig) -> HookedEngine:
        return HookedEngine(wanted, net)

    with (
        blocking.open_fabric(config, engine_factory=engine) as reader,
        blocking.open_fabric(config, engine_factory=engine) as writer,
    ):
        source, target = writer.allocate(LENGTH), reader.allocate(LENGTH)
        source.memory[:] = bytes(range(256)) * (LENGTH // 256)
        writer.connect(reader.address)
        net.hold = hold
        try:
            yield Pair(net, writer, reader, source, target, target.key())
        finally:
            net.release()


class Call:
    """A call in a thread of its own, and how it ended: `value` or `error`."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._arguments = arguments
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def join(self) -> Call:
        """Wait for its end."""
        self._thread.join(SOON_S)
        assert self.ended, f"{self._call} hangs"
        return self

    def result(self) -> Any:
        """Return its value, or raise its error."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.value

    def _run(self) -> None:
        try:
            self.value = self._call(*self._arguments)
        except BaseException as error:
            self.error = error


def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    for _ in range(round(SOON_S / 0.0005)):
        if condition():
            return
        threading.Event().wait(0.0005)
    raise AssertionError("the condition did not come true")


def blocked(fabric: blocking.Fabric, count: int) -> None:
    """Return when so many threads sleep in waits of the fabric."""
    adapter = fabric._dispatcher.adapter

    def all_sleep() -> bool:
        with fabric._dispatcher.lock:
            return adapter._asleep + len(adapter._followers) == count

    until(all_sleep)
