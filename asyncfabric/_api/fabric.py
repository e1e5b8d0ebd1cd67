"""Fabric: what a task holds of an open fabric, with the calls that wait. The others stand in `any_fabric`.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.any_fabric import AnyFabric
from asyncfabric._api.checks import MAX_BYTES, checked_access, checked_imm, checked_index
from asyncfabric._api.closing import close_fabric
from asyncfabric._api.connecting import connect_peer, disconnect_peer, warm_peers
from asyncfabric._api.counter import ImmCounter
from asyncfabric._api.counter_opening import open_counter_later, open_counter_now
from asyncfabric._api.messages import MessageStream
from asyncfabric._api.peer import Peer, WarmReport
from asyncfabric._api.region import Region
from asyncfabric._api.registering import allocate_region, checked_device, register_region
from asyncfabric._api.transfer import Transfer
from asyncfabric._api.watch import WatchWord
from asyncfabric._api.writable import wait_writable
from asyncfabric.types import MAX_IMM, AccessMode


class Fabric(AnyFabric[Transfer]):
    """An open fabric, made by `async with open_fabric() as fabric`.

    Used from the event loop and the thread that opened it: other threads get RuntimeError, and nothing is changed.
    They have ImmCounter.spin and WatchWord.store, and read values (addresses, keys, memory, ended transfers).
    """

    _transfer_type = Transfer

    async def register(self, buffer: object, access: AccessMode = "read-write") -> Region:
        """Register memory of the caller: torch tensor, numpy array, bytearray, memoryview, anything with DLPack.

        The buffer must be contiguous; it is kept alive until the region is released. Read-only buffers may be
        registered with access "read" or "local" only.

        Raises:
            TypeError, ValueError: not memory, not contiguous, empty, or access that the buffer does not permit.
            DeviceError: no memory could be pinned, or no provider for its device is in this build.

        Cancellation: shielded until the engine answered; what was registered is released again, then it goes on.
        """
        self._check_open()
        return await register_region(Region, self._dispatcher, self._resolver, buffer, checked_access(access))

    async def allocate(
        self, length_bytes: SupportsIndex, device: str | int = "cpu", access: AccessMode = "read-write"
    ) -> Region:
        """Allocate pages of the engine's own: the fastest memory for every provider. Filled with zeros.

        Raises:
            TypeError, ValueError: not a positive length, or more than 64 TiB.
            DeviceError: no memory left, or no provider for the device in this build.

        Cancellation: shielded until the engine answered; what was allocated is released again, then it goes on.
        """
        self._check_open()
        length = checked_index("length_bytes", length_bytes, 1, MAX_BYTES)
        return await allocate_region(Region, self._dispatcher, length, checked_device(device), checked_access(access))

    async def connect(self, address: FabricAddress | bytes) -> Peer:
        """Connect to a fabric, which may be this one; a peer that is connected already answers at once.

        Raises:
            ValueError: not an address.
            PeerError: the peer cannot be reached within `config.connect_deadline`, refuses, or is carried by a provider
                that `config.require` forbids.

        Cancellation: the connecting goes on in the engine; only the wait for it ends.
        """
        self._check_open()
        return await connect_peer(self._dispatcher, self._peers, address)

    async def disconnect(self, peer: Peer) -> None:
        """Drop the connection to a peer. What was posted to it drains or fails; the next use connects again.

        That is a write or read with any key of it, or a signal or message that names `peer` (its `lost` stays true:
        `connect()` returns the name of the new connection). A peer that was lost is connected again by its address, or
        by a key of it that is first used after the loss.

        Cancellation: the disconnecting goes on in the engine; only the wait for it ends.
        """
        await disconnect_peer(self._dispatcher, peer, self._own(peer))

    async def warm(self, addresses: Iterable[FabricAddress | bytes]) -> list[WarmReport]:
        """Connect to many fabrics at once and report for each; never raises for a peer that cannot be reached.

        Raises:
            TypeError, ValueError: one of them is no address; then nothing was connected.

        Cancellation: the connecting goes on in the engine; only the wait for it ends.
        """
        self._check_open()
        return await warm_peers(self._dispatcher, self._peers, addresses)

    def messages(self) -> MessageStream:
        """Return an iterator over received messages (peer, payload): `async for message in fabric.messages()`.

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
        return open_counter_now(ImmCounter, self._dispatcher, checked_imm(imm))

    async def open_counter(self, imm: SupportsIndex) -> ImmCounter:
        """Open the counter of an immediate value that had one before, once all peers have confirmed its close.

        A peer confirms when everything that it had submitted for the closed counter has ended, or by being lost.
        Whatever peers submit after this returned counts for the new counter, and nothing older does.

        Raises:
            TypeError, ValueError: a bad imm.
            BusyError: the counter of this imm is open already, also when another task opened it meanwhile.
            ClosedError: the fabric is closed, also when that happens during the wait.

        Cancellation: only this wait ends; no counter is open.
        """
        self._check_open()
        return await open_counter_later(ImmCounter, self._dispatcher, checked_index("imm", imm, 0, MAX_IMM))

    def watch(self) -> WatchWord:
        """Return a 64-bit word that kernels and threads may store to: `async with fabric.watch() as word`."""
        self._check_open()
        return WatchWord(self._dispatcher)

    async def wait_writable(self) -> None:
        """Return when a transfer may be submitted that would have raised BusyError.

        Another task may take the free place first, so loop over submitting and waiting.

        Cancellation: only this wait ends.
        """
        self._check_open()
        await wait_writable(self._dispatcher)

    async def aclose(self) -> None:
        """Drain every submitted transfer, then close; idempotent, any number of tasks may call it.

        What has not begun to leave within `config.drain_deadline` ends with TransferError: messages that a peer has
        no room for, writes after a stream or word that does not get there, what waits for a connection.

        Raises:
            RuntimeError: called in another thread or event loop; then nothing was changed.

        Cancellation: stops posting what is unposted, drains what is posted (shielded, bounded by
        `config.drain_deadline`), closes, and then goes on. When it returns or raises, nothing touches registered memory
        any more.
        """
        await close_fabric(self._dispatcher, drain_all=True)
