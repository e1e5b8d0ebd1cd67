"""AnyFabric: what a fabric does without waiting, whoever holds it: its data calls, and what it knows about itself.

Runs on the event loop's thread; of a fabric of threads (`asyncfabric.blocking`) on any. No state of its own beyond the
dispatcher and the peers it has names for.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, get_args

from asyncfabric._api.address import FabricAddress
from asyncfabric._api.counter_opening import closings_waiting
from asyncfabric._api.page_ops import PageOps
from asyncfabric._api.peer import peer_statistics
from asyncfabric._api.peers_known import PeersKnown
from asyncfabric._api.region_list import list_regions
from asyncfabric._api.transfer import TransferT
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.faults import closed_meanwhile
from asyncfabric.errors import ClosedError
from asyncfabric.observe.why import format_waiting
from asyncfabric.types import RailInfo, RailLeftOut, RegionInfo, Statistics, TraceEvent, TraceWhat, Waiting

if TYPE_CHECKING:
    from asyncfabric._api.key import RegionKey
    from asyncfabric._api.registering import Resolver
    from asyncfabric._bridge.dispatcher import CompletionDispatcher
    from asyncfabric.config import FabricConfig

_TRACED: tuple[TraceWhat, ...] = get_args(TraceWhat)


class AnyFabric(PageOps[TransferT]):
    """An open fabric, as far as nothing waits."""

    def __init__(self, dispatcher: CompletionDispatcher, config: FabricConfig, resolver: Resolver) -> None:
        """Not for users: use `open_fabric`."""
        self._dispatcher = dispatcher
        self._transfer_type = type(self)._transfer_type  # of the instance: found faster, for each transfer
        self._config = config
        self._resolver = resolver
        self._peers = PeersKnown(dispatcher, config)
        self._address = FabricAddress(dispatcher.engine.incarnation(), dispatcher.engine.address())

    @property
    def address(self) -> FabricAddress:
        """Where peers reach this fabric; carries a random incarnation.

        Another one after a failed device was opened again.
        """
        with suppress(ClosedError), closed_meanwhile("the fabric"):
            if not self.closed:
                self._address = FabricAddress(self._address.incarnation, self._dispatcher.engine.address())
        return self._address

    def mapped_memory(self, key: RegionKey) -> memoryview | None:
        """Return the writable bytes behind a peer's key where this process has them mapped, else None.

        As `ucp_rkey_ptr` of UCX and `nvshmem_ptr` of NVSHMEM: over shared memory of one host a store is the write. None
        where a rail reaches the memory in another way, where the key permits no writing or is strict, for memory that
        its owner registered instead of allocating it, until the first transfer with this key has ended, which shows
        the key to its owner, and for a key that its owner has revoked since it was first used here.

        What is stored there is visible to whoever sees the immediate of a transfer that is submitted afterwards. The
        view stays usable when the peer is lost or has released the memory: nobody sees what is stored then. **Neither
        `region.revoke()` nor `region.release()` of the owner waits for who stores**, so it is for memory that its owner
        never revokes, and reads only where a counter states that stores are over.

        Raises:
            ValueError: the bytes of the key are damaged.
            StaleKeyError: the key is known to be dead at its first use.
            ClosedError: the fabric is closed.
        """
        engine = self._dispatcher.engine
        try:
            return engine.key_memory(key.open_for(self._dispatcher).id)
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"mapping {key!r}")) from None

    @property
    def config(self) -> FabricConfig:
        """What the fabric was opened with."""
        return self._config

    @property
    def rails(self) -> tuple[RailInfo, ...]:
        """What was really opened, and why: provider, device, library file, speed."""
        self._check_open()
        with closed_meanwhile("the fabric"):
            return tuple(RailInfo(**row) for row in self._dispatcher.engine.rails())

    @property
    def rails_left_out(self) -> tuple[RailLeftOut, ...]:
        """What `rails="auto"` did not open, each with its reason; empty where all rails are named."""
        self._check_open()
        return tuple(RailLeftOut(**row) for row in self._dispatcher.engine.rails_left_out())

    @property
    def closed(self) -> bool:
        """Whether closing the fabric has begun."""
        return self._dispatcher.closing

    def statistics(self) -> Statistics:
        """Return the counters of the engine, its peers and its rails, as a frozen value."""
        self._check_open()
        engine = self._dispatcher.engine
        with closed_meanwhile("the fabric"):
            peers = tuple(peer_statistics(row) for row in engine.peers())
            return Statistics(engine.statistics(), peers, self.rails)

    def regions(self) -> tuple[RegionInfo, ...]:
        """Return what is registered: size, place, generation, age and what registering cost; the oldest first."""
        self._check_open()
        return list_regions(self._dispatcher)

    def why(self) -> list[Waiting]:
        """Return who waits for what, what is missing and from whom, oldest first; also transfers that nobody awaits.

        Closed counters whose imm cannot be opened again yet are among them, with the peers that have not confirmed.
        """
        self._dispatcher.check_thread()
        with closed_meanwhile("the fabric"):
            return [*self._dispatcher.waiting(), *closings_waiting(self._dispatcher)]

    def why_text(self) -> str:
        """Return `why()` as lines for people."""
        return format_waiting(self.why())

    def set_trace(self, on: bool) -> None:
        """Switch the engine's trace points on or off; off, they cost a branch each."""
        self._check_open()
        with closed_meanwhile("the fabric"):
            self._dispatcher.engine.set_trace(bool(on))

    def take_trace(self) -> list[TraceEvent]:
        """Return the newest trace events, at most 4,096, oldest first; `asyncfabric.observe.trace` draws them."""
        self._check_open()
        with closed_meanwhile("the fabric"):
            events = self._dispatcher.engine.take_trace()
        return [TraceEvent(time_ns, _TRACED[what], subject, value) for time_ns, what, subject, value in events]

    def _check_open(self) -> None:
        self._dispatcher.check_thread()
        if self._dispatcher.closing:
            raise faults.closed("the fabric")

    def __repr__(self) -> str:
        return f"<Fabric {self._address.incarnation:016x}{', closed' if self.closed else ''}>"
