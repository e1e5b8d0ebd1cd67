"""Join: where the ranks of a training and of its engines find each other: values by key, and channels by name.

Event loop's thread, apart from the calls of a store, which block and run in threads.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncfabric import Fabric
from asyncfabric._groups import beside
from asyncfabric._notice import Notice
from asyncfabric.control import LocalChannels, StoreChannels
from asyncfabric.control.channels.store import DEADLINE_S
from asyncfabric.control.channels.store_calls import KeyStore, connected_apart
from asyncfabric.errors import BrokenError
from asyncfabric.weights.channel import WEIGHT_CODEC, WeightChannel
from asyncfabric.weights.messages import WeightMessage
from asyncfabric.weights.sessions.renewed import RenewedChannel

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

POLL_S = 0.005
MOST_POLL_S = 0.1

Result = TypeVar("Result")


class Join(Protocol):
    """One meeting of a training and its engines, for one life of both."""

    async def put(self, key: str, value: bytes) -> None:
        """Write a value that others wait for.

        Cancellation: it was written, or will be.
        """

    async def take_number(self, key: str) -> int:
        """Return how often this was called with a key before, by anybody.

        Cancellation: a number may be taken that nobody has.
        """

    async def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Cancellation: only this wait ends.
        """

    def open_channel(self, name: str) -> AbstractAsyncContextManager[WeightChannel]:
        """Open the channel of a participant, which leaves with the block."""


class LocalJoin:
    """A meeting within one process and one event loop."""

    def __init__(self) -> None:
        """Make a meeting; give it to all who take part."""
        self._values: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}
        self._changed = Notice()
        self._channels = LocalChannels(WEIGHT_CODEC)

    async def put(self, key: str, value: bytes) -> None:
        """Write a value.

        Cancellation: it was not written.
        """
        await anyio.lowlevel.checkpoint()
        self._values[key] = value
        self._changed.notify()

    async def take_number(self, key: str) -> int:
        """Return how often this was called with a key before.

        Cancellation: no number was taken.
        """
        await anyio.lowlevel.checkpoint()
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        return number

    async def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Cancellation: only this wait ends.
        """
        while key not in self._values:
            await self._changed.wait()
        return self._values[key]

    @asynccontextmanager
    async def open_channel(self, name: str) -> AsyncIterator[WeightChannel]:
        """Open the channel of a participant.

        Cancellation: the others lose it.
        """
        channel = self._channels.open(name)
        try:
            yield channel
        finally:
            self._channels.close(name)


class StoreJoin:
    """A meeting over a torch.distributed store, which all processes of it can reach; the store has to outlive it.

    Raises BrokenError where the store does not answer any more.
    """

    def __init__(self, store: KeyStore, name: str = "weights", *, deadline_s: float = DEADLINE_S) -> None:
        """Meet over a store.

        Args:
            store: a TCPStore, or any other of torch.distributed; a training has one already:
                `torch.distributed.distributed_c10d._get_default_store()`. Engines outside of its group connect a
                TCPStore of their own to the same host and port. The meeting has a connection of its own (from torch 2.8
                on), so that the program may wait for keys of the same store.
            name: distinguishes meetings of one store; a training that starts again on a store takes another one.
            deadline_s: who gives no sign of life for so long is lost.
        """
        self._store = store
        self._own: KeyStore | None = None
        self._name = name
        self._deadline_s = deadline_s

    async def put(self, key: str, value: bytes) -> None:
        """Write a value.

        Cancellation: it was written, or will be.
        """
        await self._call(lambda store: store.set(self._key(key), value))

    async def take_number(self, key: str) -> int:
        """Return how often this was called with a key before, by anybody.

        Cancellation: a number may be taken that nobody has.
        """
        return await self._call(lambda store: store.add(self._key(key), 1)) - 1

    async def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Cancellation: only this wait ends.
        """
        whole = self._key(key)
        # A store's own get() waits in C++ and keeps all other calls of this process waiting.
        pause_s = POLL_S
        while not await self._call(lambda store: store.check([whole])):
            await anyio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, MOST_POLL_S)  # what nobody is in a hurry for, as the next engine that joins
        return await self._call(lambda store: store.get(whole))

    @asynccontextmanager
    async def attend(self) -> AsyncIterator[AttendedJoin]:
        """Take part as one member of the store, however many channels are opened: its process looks there once.

        Cancellation: the others lose all channels of it.
        """
        prefix = f"{self._name}/channels"
        own = await self._call(lambda store: store)  # kept: one to a store that is gone would be waited for

        def begun() -> StoreChannels[WeightMessage]:
            return StoreChannels(own, WEIGHT_CODEC, prefix=prefix, deadline_s=self._deadline_s)

        async with beside() as tasks:
            members = AttendedJoin(self, begun, self._deadline_s)
            tasks.start_soon(members.run)
            yield members

    @asynccontextmanager
    async def open_channel(self, name: str) -> AsyncIterator[WeightChannel]:
        """Open the channel of a participant by itself, and give signs of life meanwhile.

        Cancellation: the others lose it.
        """
        async with self.attend() as members, members.open_channel(name) as channel:
            yield channel

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    async def _call(self, call: Callable[[KeyStore], Result]) -> Result:
        def called() -> Result:
            if self._own is None:
                self._store.check([self._key("members")])  # a store that is gone fails here at once
                self._own = connected_apart(self._store)
            return call(self._own)

        try:
            return await anyio.to_thread.run_sync(called, abandon_on_cancel=True)
        except RuntimeError as error:  # torch's DistError is one
            reason = str(error).partition("\n")[0]
            raise BrokenError(
                f"the store of {self._name} does not answer: {reason}", remedy="is the process that serves it alive?"
            ) from error


class AttendedJoin:
    """A StoreJoin that a process takes part in: its channels begin anew together where the others lost them."""

    def __init__(self, join: StoreJoin, begun: Callable[[], StoreChannels[WeightMessage]], deadline_s: float) -> None:
        """Not for users: `async with join.attend()`."""
        self._join = join
        self._begun = begun
        self._deadline_s = deadline_s
        self._members = begun()
        self._fabric: Fabric | None = None
        self._open: dict[str, RenewedChannel] = {}
        self._wanted = anyio.Event()  # a channel was opened
        self._turn = anyio.Lock()  # a channel is opened, or all begin anew

    def use_fabric(self, fabric: Fabric) -> None:
        """Send messages over a fabric where its peers reach each other; before the first channel is opened."""
        if self._fabric is None:
            self._fabric = fabric
            self._members.use_fabric(fabric)

    async def put(self, key: str, value: bytes) -> None:
        """Write a value.

        Cancellation: it was written, or will be.
        """
        await self._join.put(key, value)

    async def take_number(self, key: str) -> int:
        """Return how often this was called with a key before, by anybody.

        Cancellation: a number may be taken that nobody has.
        """
        return await self._join.take_number(key)

    async def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Cancellation: only this wait ends.
        """
        return await self._join.get(key)

    @asynccontextmanager
    async def open_channel(self, name: str) -> AsyncIterator[WeightChannel]:
        """Open the channel of a participant; it begins anew if others lose it.

        Cancellation: the others lose it.
        """
        async with self._turn:
            channel = self._open[name] = RenewedChannel(await self._members.open(name))
            self._wanted.set()
        try:
            yield channel
        finally:
            with anyio.move_on_after(self._deadline_s, shield=True), suppress(BrokenError):
                async with self._turn:
                    del self._open[name]
                    await channel.aclose()

    async def run(self) -> None:
        """Receive for all channels, once there is one, and give signs of life, until there is no store.

        Cancellation: the channels end.
        """
        await self._wanted.wait()
        try:
            while True:
                try:
                    await self._members.run()
                except BrokenError as error:
                    logger.warning("%s begin anew in their meeting: %s", ", ".join(self._open), error)
                async with self._turn:
                    members = self._begun()
                    if self._fabric is not None:
                        members.use_fabric(self._fabric)
                    for name, channel in self._open.items():
                        channel.renew(await members.open(name))
                    self._members = members
        except BrokenError as error:  # no store; an engine goes on with the version that it has
            logger.warning("%s left their meeting: %s", ", ".join(self._open), error)
        finally:
            for channel in self._open.values():
                channel.end()


def use_fabric(join: Join, fabric: Fabric) -> None:
    """Have the channels of a meeting over a store send their messages over a fabric, whose messages nobody else reads.

    A store takes milliseconds for a message.
    """
    if isinstance(join, AttendedJoin):
        join.use_fabric(fabric)
