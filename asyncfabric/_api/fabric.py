"""Fabric: what a user holds of an open fabric. The data calls stand in `data_ops`, the end in `closing`.

Runs on the event loop's thread. No state of its own beyond the stairwell and the peers it has names for.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, SupportsIndex, get_args

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.boxes import BoxOps
from asyncfabric._api.checks import (
    MAX_BYTES,
    checked_access,
    checked_imm,
    checked_index,
    checked_iterable,
)
from asyncfabric._api.closing import close_fabric
from asyncfabric._api.control import ControlCall, submit_control
from asyncfabric._api.counter import ImmCounter
from asyncfabric._api.counter_opening import closings_waiting, open_counter_later, open_counter_now
from asyncfabric._api.messages import MessageStream
from asyncfabric._api.peer import Peer, WarmReport, peer_statistics
from asyncfabric._api.peers_known import PeersKnown
from asyncfabric._api.region import Region
from asyncfabric._api.region_list import list_regions
from asyncfabric._api.registering import allocate_region, checked_device, register_region
from asyncfabric._api.watch import WatchWord
from asyncfabric._api.writable import wait_writable
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.errors import FabricError
from asyncfabric.observe.why import format_waiting
from asyncfabric.types import MAX_IMM, AccessMode, RailInfo, RegionInfo, Statistics, TraceEvent, TraceWhat, Waiting

if TYPE_CHECKING:
    from asyncfabric._api.registering import Resolver
    from asyncfabric._bridge.stairwell import Stairwell
    from asyncfabric.config import FabricConfig


_TRACED: tuple[TraceWhat, ...] = get_args(TraceWhat)


class Fabric(BoxOps):
    """An open fabric, made by `async with open_fabric() as fabric`.

    Used from the event loop and the thread that opened it: other threads get RuntimeError, and nothing is changed.
    They have ImmCounter.spin and WatchWord.store, and read values (addresses, keys, memory, ended transfers).
    """

    def __init__(self, stairwell: Stairwell, config: FabricConfig, resolver: Resolver) -> None:
        """Not for users: use `open_fabric`."""
        self._stairwell = stairwell
        self._config = config
        self._resolver = resolver
        self._peers = PeersKnown(stairwell, config)
        self._address = FabricAddress(stairwell.engine.incarnation(), stairwell.engine.address())

    @property
    def address(self) -> FabricAddress:
        """Where peers reach this fabric; carries a random incarnation."""
        return self._address

    @property
    def config(self) -> FabricConfig:
        """What the fabric was opened with."""
        return self._config

    @property
    def rails(self) -> tuple[RailInfo, ...]:
        """What was really opened: provider, device, library file, speed."""
        self._check_open()
        return tuple(RailInfo(**row) for row in self._stairwell.engine.rails())

    @property
    def closed(self) -> bool:
        """Whether closing the fabric has begun."""
        return self._stairwell.closing

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
        return await register_region(self._stairwell, self._resolver, buffer, checked_access(access))

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
        return await allocate_region(self._stairwell, length, checked_device(device), checked_access(access))

    async def connect(self, address: FabricAddress | bytes) -> Peer:
        """Connect to a fabric, which may be this one; a peer that is connected already answers at once.

        Raises:
            ValueError: not an address.
            PeerError: the peer cannot be reached within `config.connect_deadline`, refuses, or is carried by a provider
                that `config.require` forbids.

        Cancellation: the connecting goes on in the engine; only the wait for it ends.
        """
        self._check_open()
        return await self._connected(*self._submit_connect(address))

    async def disconnect(self, peer: Peer) -> None:
        """Drop the connection to a peer. What was posted to it drains or fails; the next use connects again.

        That is a write or read with any key of it, or a signal or message that names `peer` (its `lost` stays true:
        `connect()` returns the name of the new connection). Peers that were lost have to be connected by address.

        Cancellation: the disconnecting goes on in the engine; only the wait for it ends.
        """
        stairwell = self._stairwell
        call = submit_control(stairwell, f"disconnecting {peer!r}", stairwell.engine.submit_disconnect, self._own(peer))
        await call.wait()

    async def warm(self, addresses: Iterable[FabricAddress | bytes]) -> list[WarmReport]:
        """Connect to many fabrics at once and report for each; never raises for a peer that cannot be reached.

        Raises:
            TypeError, ValueError: one of them is no address; then nothing was connected.

        Cancellation: the connecting goes on in the engine; only the wait for it ends.
        """
        self._check_open()
        if isinstance(addresses, (FabricAddress, bytes, str)):
            raise TypeError(f"warm() takes a list of addresses, got one {type(addresses).__name__}")
        begin = monotonic()
        parsed = [_address(address) for address in checked_iterable("addresses", addresses, "addresses")]
        submitted: list[tuple[FabricAddress, ControlCall | None, FabricError | None]] = []
        for address in parsed:
            try:
                submitted.append((address, self._submit_connect(address)[0], None))
            except FabricError as refusal:
                submitted.append((address, None, refusal))
        outcomes: list[tuple[FabricAddress, Peer | None, FabricError | None, float]] = []
        for address, call, error in submitted:
            peer = None
            if call is not None:
                try:
                    peer = await self._connected(call, address)
                except FabricError as failure:
                    error = failure
            outcomes.append((address, peer, error, monotonic() - begin))
        carried = self._peers.providers()
        return [
            WarmReport(address, peer, carried.get(peer.id, "") if peer is not None else "", error, duration)
            for address, peer, error, duration in outcomes
        ]

    def messages(self) -> MessageStream:
        """Return an iterator over received messages (peer, payload): `async for message in fabric.messages()`.

        At most 64 of each sender wait to be taken; beyond that it waits.
        """
        return MessageStream(self._stairwell, self._peers)

    def counter(self, imm: SupportsIndex | None = None) -> ImmCounter:
        """Open the counter of an immediate value; None picks a free one, which `counter.imm` names.

        Arrivals that came before its first counter are counted; while it is closed they are stale. Never waits.

        Raises:
            TypeError, ValueError: a bad imm.
            BusyError: the counter of this imm is open already; it had a counter before, and peers have not confirmed
                that nothing which counts for that one is under way (`open_counter` waits for them); or no imm is free.
        """
        self._check_open()
        return open_counter_now(self._stairwell, checked_imm(imm))

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
        return await open_counter_later(self._stairwell, checked_index("imm", imm, 0, MAX_IMM))

    def watch(self) -> WatchWord:
        """Return a 64-bit word that kernels and threads may store to: `async with fabric.watch() as word`."""
        self._check_open()
        return WatchWord(self._stairwell)

    async def wait_writable(self) -> None:
        """Return when a transfer may be submitted that would have raised BusyError.

        Another task may take the free place first, so loop over submitting and waiting.

        Cancellation: only this wait ends.
        """
        self._check_open()
        await wait_writable(self._stairwell)

    def statistics(self) -> Statistics:
        """Return the counters of the engine, its peers and its rails, as a frozen value."""
        self._check_open()
        engine = self._stairwell.engine
        peers = tuple(peer_statistics(row) for row in engine.peers())
        return Statistics(engine.statistics(), peers, self.rails)

    def regions(self) -> tuple[RegionInfo, ...]:
        """Return what is registered: size, place, generation, age and what registering cost; the oldest first."""
        self._check_open()
        return list_regions(self._stairwell)

    def why(self) -> list[Waiting]:
        """Return who waits for what, what is missing and from whom, oldest first; also transfers that nobody awaits.

        Closed counters whose imm cannot be opened again yet are among them, with the peers that have not confirmed.
        """
        self._stairwell.check_thread()
        return [*self._stairwell.waiting(), *closings_waiting(self._stairwell)]

    def why_text(self) -> str:
        """Return `why()` as lines for people."""
        return format_waiting(self.why())

    def set_trace(self, on: bool) -> None:
        """Switch the engine's trace points on or off; off, they cost a branch each."""
        self._check_open()
        self._stairwell.engine.set_trace(bool(on))

    def take_trace(self) -> list[TraceEvent]:
        """Return the newest trace events, at most 4,096, oldest first; `asyncfabric.observe.trace` draws them."""
        self._check_open()
        events = self._stairwell.engine.take_trace()
        return [TraceEvent(time_ns, _TRACED[what], subject, value) for time_ns, what, subject, value in events]

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
        await close_fabric(self._stairwell, drain_all=True)

    def _check_open(self) -> None:
        self._stairwell.check_thread()
        if self._stairwell.closing:
            raise faults.closed("the fabric")

    def _submit_connect(self, address: FabricAddress | bytes) -> tuple[ControlCall, FabricAddress]:
        parsed = _address(address)
        stairwell = self._stairwell
        what = f"connecting to {parsed!r}"
        try:
            incarnation = stairwell.engine.check_address(parsed.engine_bytes)
        except EngineStatusError as error:
            raise faults.refused(error, faults.Scene(what)) from None
        if incarnation != parsed.incarnation:
            raise ValueError(f"{parsed!r} is damaged: its engine bytes are of incarnation {incarnation:016x}")
        return submit_control(stairwell, what, stairwell.engine.submit_connect, parsed.engine_bytes), parsed

    async def _connected(self, call: ControlCall, address: FabricAddress) -> Peer:
        peer = self._peers.by_id(await call.wait(), address)
        self._peers.check_provider(peer)
        return peer

    def __repr__(self) -> str:
        return f"<Fabric {self._address.incarnation:016x}{', closed' if self.closed else ''}>"


def _address(address: object) -> FabricAddress:
    if isinstance(address, FabricAddress):
        return address
    if isinstance(address, bytes):
        return FabricAddress.from_bytes(address)
    kind = type(address).__name__
    raise TypeError(f"expected a FabricAddress or its bytes, got {kind}; FabricAddress.parse() reads text")
