"""Fabric without an event loop: what any thread holds of an open fabric. What does not wait stands in `any_fabric`.

Any thread, several at once: submissions take no lock, waits are those of `asyncfabric._bridge.threads`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.any_fabric import AnyFabric
from asyncfabric._api.checks import MAX_BYTES, checked_access, checked_imm, checked_index
from asyncfabric._api.closing import close_fabric
from asyncfabric._api.connecting import connect_peer, disconnect_peer, warm_peers
from asyncfabric._api.counter_opening import open_counter_later, open_counter_now
from asyncfabric._api.peer import Peer, WarmReport
from asyncfabric._api.registering import Resolver, allocate_region, checked_device, register_region
from asyncfabric._api.writable import wait_writable
from asyncfabric._bridge.threads import ThreadDispatcher
from asyncfabric.blocking.counter import ImmCounter
from asyncfabric.blocking.deadlines import until
from asyncfabric.blocking.messages import MessageStream
from asyncfabric.blocking.region import Region
from asyncfabric.blocking.transfer import Transfer
from asyncfabric.blocking.watch import WatchWord
from asyncfabric.config import FabricConfig
from asyncfabric.types import MAX_IMM, AccessMode


class Fabric(AnyFabric[Transfer]):
    """An open fabric, made by `with blocking.open_fabric() as fabric`.

    Used from any thread, and from several at once. What waits blocks the calling thread alone; where no deadline is
    taken, those of the configuration bound it.
    """

    _transfer_type = Transfer
    _region_type = Region
    _counter_type = ImmCounter
    _dispatcher: ThreadDispatcher

    def __init__(self, dispatcher: ThreadDispatcher, config: FabricConfig, resolver: Resolver) -> None:
        """Not for users: use `open_fabric`."""
        super().__init__(dispatcher, config, resolver)
        self._dispatcher = dispatcher

    def register(self, buffer: object, access: AccessMode = "read-write") -> Region:
        """Register memory of the caller: torch tensor, numpy array, bytearray, memoryview, anything with DLPack.

        The buffer must be contiguous; it is kept alive until the region is released. Read-only buffers may be
        registered with access "read" or "local" only. Ctrl-C gives back what was registered, and then goes on.

        Raises:
            TypeError, ValueError: not memory, not contiguous, empty, or access that the buffer does not permit.
            DeviceError: no memory could be pinned, or no provider for its device is in this build.
        """
        self._check_open()
        bits = checked_access(access)
        return self._dispatcher.run(register_region(self._region_type, self._dispatcher, self._resolver, buffer, bits))

    def allocate(
        self, length_bytes: SupportsIndex, device: str | int = "cpu", access: AccessMode = "read-write"
    ) -> Region:
        """Allocate pages of the engine's own: the fastest memory for every provider. Filled with zeros.

        Raises:
            TypeError, ValueError: not a positive length, or more than 64 TiB.
            DeviceError: no memory left, or no provider for the device in this build.
        """
        self._check_open()
        length = checked_index("length_bytes", length_bytes, 1, MAX_BYTES)
        number, bits = checked_device(device), checked_access(access)
        return self._dispatcher.run(allocate_region(self._region_type, self._dispatcher, length, number, bits))

    def connect(self, address: FabricAddress | bytes) -> Peer:
        """Connect to a fabric, which may be this one; a peer that is connected already answers at once.

        Raises:
            ValueError: not an address.
            PeerError: the peer cannot be reached within `config.connect_deadline`, refuses, or is carried by a provider
                that `config.require` forbids.
        """
        self._check_open()
        return self._dispatcher.run(connect_peer(self._dispatcher, self._peers, address))

    def disconnect(self, peer: Peer) -> None:
        """Drop the connection to a peer. What was posted to it drains or fails; the next use connects again.

        That is a write or read with any key of it, or a signal or message that names `peer` (its `lost` stays true:
        `connect()` returns the name of the new connection). A peer that was lost is connected again by its address, or
        by a key of it that is first used after the loss.
        """
        self._dispatcher.run(disconnect_peer(self._dispatcher, peer, self._own(peer)))

    def warm(self, addresses: Iterable[FabricAddress | bytes]) -> list[WarmReport]:
        """Connect to many fabrics at once and report for each; never raises for a peer that cannot be reached.

        Raises:
            TypeError, ValueError: one of them is no address; then nothing was connected.
        """
        self._check_open()
        return self._dispatcher.run(warm_peers(self._dispatcher, self._peers, addresses))

    def messages(self) -> MessageStream:
        """Return what receives messages (peer, payload): `receive()`, `take_nowait()`, or a loop over it.

        At most 64 of each sender wait to be taken; beyond that it waits.
        """
        return MessageStream(self._dispatcher, self._peers)

    def counter(self, imm: SupportsIndex | None = None) -> ImmCounter:
        """Open the counter of an immediate value; None picks a free one, which `counter.imm` names.

        Arrivals that came before its first counter are counted; while it is closed they are stale. Never waits.

        Raises:
            TypeError, ValueError: a bad imm.
            BusyError: the counter of this imm is open already; it had a counter before, and peers have not confirmed
                that nothing which counts for that one is under way (`open_counter` waits for them); or no imm is free.
        """
        self._check_open()
        return open_counter_now(self._counter_type, self._dispatcher, checked_imm(imm))

    def open_counter(self, imm: SupportsIndex, *, deadline: float | None = None) -> ImmCounter:
        """Open the counter of an immediate value that had one before, once all peers have confirmed its close.

        A peer confirms when everything that it had submitted for the closed counter has ended, or by being lost.
        Whatever peers submit after this returned counts for the new counter, and nothing older does.

        Args:
            imm: the immediate value.
            deadline: seconds from now; None waits as long as it takes.

        Raises:
            TypeError, ValueError: a bad imm.
            TimeoutError: not all have confirmed by then; no counter is open.
            BusyError: the counter of this imm is open already, also when another thread opened it meanwhile.
            ClosedError: the fabric is closed, also when that happens during the wait.
        """
        self._check_open()
        number, limit = checked_index("imm", imm, 0, MAX_IMM), until(deadline)
        try:
            return self._dispatcher.run(open_counter_later(self._counter_type, self._dispatcher, number), limit)
        except TimeoutError:
            raise TimeoutError(
                f"the last counter of imm {number} is closed, and after {deadline:g} s peers have not confirmed it; "
                "fabric.why() names them"
            ) from None

    def watch(self) -> WatchWord:
        """Return a 64-bit word that kernels and threads may store to: `with fabric.watch() as word`."""
        self._check_open()
        return WatchWord(self._dispatcher)

    def wait_writable(self, *, deadline: float | None = None) -> None:
        """Return when a transfer may be submitted that would have raised BusyError.

        Another thread may take the free place first, so loop over submitting and waiting.

        Args:
            deadline: seconds from now; None waits as long as it takes.

        Raises:
            TimeoutError: no place was free by then.
        """
        self._check_open()
        limit = until(deadline)
        try:
            self._dispatcher.run(wait_writable(self._dispatcher), limit)
        except TimeoutError:
            raise TimeoutError(
                f"{self._config.max_ops} transfers are in flight, and none has ended within {deadline:g} s"
            ) from None

    def close(self) -> None:
        """Drain every submitted transfer, then close; idempotent, any number of threads may call it.

        What has not begun to leave within `config.drain_deadline` ends with TransferError: messages that a peer has
        no room for, writes after a stream or word that does not get there, what waits for a connection. Threads that
        wait for something else get ClosedError. Ctrl-C stops posting what is unposted and is raised when the fabric is
        closed. When it returns or raises, nothing touches registered memory any more.
        """
        self._dispatcher.run(close_fabric(self._dispatcher, drain_all=True))
