"""The worker of an engine that decodes: offers blocks, counts what arrives, and gives blocks back with proof.

One thread at a time, which looks and never waits; connecting and disconnecting run on one beside it. Blocks are
reported when everything has arrived, or when nothing can arrive any more: the source has confirmed it, or its
connection is cut.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from asyncfabric import Peer
from asyncfabric.blocking import Fabric, ImmCounter
from asyncfabric.errors import FabricError
from asyncfabric.integrations.vllm.heads import arrivals_of, sources_of
from asyncfabric.integrations.vllm.layout import WorkerBlocks
from asyncfabric.integrations.vllm.messages import Cancel, Ended, Mail, Offer, Source
from asyncfabric.integrations.vllm.statistics import BLOCKS, BYTES, CANCELLED, FAILED, LOAD, SECONDS, FabricStats
from asyncfabric.integrations.vllm.steps import Loading

logger: logging.Logger = logging.getLogger(__name__)

CONFIRM_S = 5.0
"""How long a source may take to confirm that it stopped; then its connection is cut."""
LOSS_CHECK_S = 0.05


@dataclass
class Feeder:
    """A worker of the source that pushes to this one; `ended`: it has confirmed an end, or was offered nothing."""

    address: bytes
    connecting: Future[Peer] | None
    peer: Peer | None = None
    fence: Future[None] | None = None
    ended: bool = False

    @property
    def over(self) -> bool:
        """Whether nothing can arrive from it any more."""
        return self.ended or (self.fence is not None and self.fence.done())


@dataclass
class Incoming:
    """A request whose blocks another engine pushes; `need`: the arrivals of all of them."""

    load: Loading
    feeders: list[Feeder]
    need: int
    begun: float
    deadline: float
    counter: ImmCounter | None = None
    stopping_until: float | None = None
    failed: str = ""
    cancelled: bool = False

    @property
    def arrived(self) -> bool:
        """Whether all blocks are whole."""
        return self.counter is not None and self.counter.value >= self.need


class Loads(NamedTuple):
    """What has ended: all requests, those that failed, and the blocks of these."""

    over: set[str]
    failed: set[str]
    blocks: set[int]


class Loadings:
    """All requests whose blocks other engines push to this worker."""

    def __init__(self, fabric: Fabric, mail: Mail, blocks: WorkerBlocks, deadline_s: float, stats: FabricStats) -> None:
        """Offer `blocks` to the workers that push to this one; a load of more than `deadline_s` seconds has failed."""
        self._fabric, self._mail, self._blocks = fabric, mail, blocks
        self._deadline_s, self._stats = deadline_s, stats
        self._beside = ThreadPoolExecutor(1, "asyncfabric-connecting")
        self._requests: dict[str, Incoming] = {}
        self._peers: dict[bytes, Peer] = {}
        self._checked = 0.0

    def begin(self, load: Loading) -> None:
        """Connect to the source of a request, and offer it blocks as soon as that is done."""
        now, source, layout = time.monotonic(), load.source, self._blocks.layout
        there = len(source.addresses)
        addresses = [source.address(rank) for rank in sources_of(layout, there)]
        found = Incoming(
            load,
            [Feeder(address, self._connect(address)) for address in addresses],
            need=len(load.blocks) * arrivals_of(layout, there, source.order),
            begun=now,
            deadline=now + self._deadline_s,
        )
        self._requests[load.request] = found
        self._open(found)

    def refuse(self, source: Source) -> None:
        """Have the source of a request that is not wanted give its blocks back."""
        self._beside.submit(self._refuse, source)

    def cancel(self, request: str) -> None:
        """Give a load up; its blocks are reported when nothing can arrive any more."""
        if found := self._requests.get(request):
            found.cancelled = True
            self._stop(found, "cancelled")

    def ended(self, peer: Peer, message: Ended) -> None:
        """Take a source's confirmation that nothing of a transfer is under way."""
        for found in self._requests.values():
            if found.load.source.transfer == message.transfer and not found.arrived:
                for feeder in found.feeders:
                    if feeder.peer is not None and feeder.peer.id == peer.id:
                        feeder.ended = True
                        self._stop(found, message.reason)

    def advance(self) -> Loads:
        """Look at every load; return those that have ended."""
        now = time.monotonic()
        look = now - self._checked > LOSS_CHECK_S
        if look:
            self._checked = now
        loads = Loads(set(), set(), set())
        for name, found in list(self._requests.items()):
            self._open(found)
            if self._over(found, now, look):
                del self._requests[name]
                self._report(found, loads, now)
        return loads

    def close(self) -> None:
        """Wait until no call is under way beside the engine's thread."""
        self._beside.shutdown()

    def _connect(self, address: bytes) -> Future[Peer]:
        known = self._peers.get(address)
        if known is not None and not known.lost:
            done: Future[Peer] = Future()
            done.set_result(known)
            return done
        return self._beside.submit(self._fabric.connect, address)

    def _open(self, found: Incoming) -> None:
        """Offer blocks to the workers of the source that have been connected meanwhile."""
        for feeder in found.feeders:
            if feeder.connecting is not None and feeder.connecting.done():
                connecting, feeder.connecting = feeder.connecting, None
                try:
                    feeder.peer = self._peers[feeder.address] = connecting.result()
                    self._offer(found, feeder)
                except (FabricError, ValueError) as error:
                    if feeder.peer is None:
                        feeder.ended = True  # no block was ever offered to it
                    else:
                        self._cut(feeder)
                    self._stop(found, str(error))

    def _offer(self, found: Incoming, feeder: Feeder) -> None:
        assert feeder.peer is not None
        load, layout = found.load, self._blocks.layout
        if found.failed:
            feeder.ended = True  # as above
            self._mail.send(feeder.peer, Cancel(load.source.transfer, layout.rank, layout.ranks))
            return
        if found.counter is None:
            found.counter = self._fabric.counter()
        self._mail.send(feeder.peer, Offer(load.source.transfer, load.first, load.blocks, found.counter.imm, layout))

    def _over(self, found: Incoming, now: float, look: bool) -> bool:
        if found.arrived:
            return True
        for feeder in found.feeders:
            if look and feeder.peer is not None and feeder.peer.lost and not feeder.over and feeder.fence is None:
                self._cut(feeder)
                self._stop(found, f"{feeder.peer!r} is lost")
        if found.stopping_until is None and now > found.deadline:
            self._stop(found, f"not all blocks have arrived within {self._deadline_s:g} s")
        if found.stopping_until is not None and now > found.stopping_until:
            for feeder in found.feeders:
                if feeder.peer is not None and not feeder.ended and feeder.fence is None:
                    self._cut(feeder)
        return all(feeder.over for feeder in found.feeders)

    def _stop(self, found: Incoming, reason: str) -> None:
        """Fail a load: every worker of the source shall push no more, and confirm that."""
        if found.stopping_until is not None:
            return
        found.failed = reason
        found.stopping_until = time.monotonic() + CONFIRM_S
        layout = self._blocks.layout
        for feeder in found.feeders:
            if feeder.peer is not None and not feeder.ended and feeder.fence is None:
                try:
                    self._mail.send(feeder.peer, Cancel(found.load.source.transfer, layout.rank, layout.ranks))
                except FabricError:
                    self._cut(feeder)

    def _cut(self, feeder: Feeder) -> None:
        """Disconnect a worker of the source: what it still writes is refused from then on."""
        assert feeder.peer is not None
        self._peers.pop(feeder.address, None)
        feeder.fence = self._beside.submit(self._fabric.disconnect, feeder.peer)

    def _report(self, found: Incoming, loads: Loads, now: float) -> None:
        whole = found.arrived
        if found.counter is not None:
            found.counter.close()
        loads.over.add(found.load.request)
        if found.cancelled:
            self._stats.data[CANCELLED] += 1
        elif whole:
            count = len(found.load.blocks) * sum(map(len, self._blocks.layout.layers)) * self._blocks.page_bytes
            self._stats.moved(LOAD, found.load.request, int(found.begun * 1e9), int(now * 1e9), count)
            self._stats.data[SECONDS].append(now - found.begun)
            self._stats.data[BYTES].append(count)
            self._stats.data[BLOCKS].append(len(found.load.blocks))
        else:
            logger.warning("request %s is computed again: %s", found.load.request, found.failed)
            self._stats.data[FAILED] += 1
            loads.failed.add(found.load.request)
            loads.blocks.update(found.load.blocks)

    def _refuse(self, source: Source) -> None:
        layout = self._blocks.layout
        for rank in sources_of(layout, len(source.addresses)):
            try:
                peer = self._fabric.connect(source.address(rank))
                self._mail.send(peer, Cancel(source.transfer, layout.rank, layout.ranks))
            except (FabricError, ValueError) as error:
                logger.info(
                    "transfer %s ends with its lease, since its source is not reached: %s", source.transfer, error
                )
