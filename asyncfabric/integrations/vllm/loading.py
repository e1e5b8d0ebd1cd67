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
from asyncfabric.integrations.vllm.layout import WorkerBlocks
from asyncfabric.integrations.vllm.messages import Cancel, Ended, Mail, Offer, Source
from asyncfabric.integrations.vllm.statistics import BLOCKS, BYTES, CANCELLED, FAILED, LOAD, SECONDS, FabricStats
from asyncfabric.integrations.vllm.steps import Loading

logger: logging.Logger = logging.getLogger(__name__)

CONFIRM_S = 5.0
"""How long a source may take to confirm that it stopped; then its connection is cut."""
LOSS_CHECK_S = 0.05


@dataclass
class Incoming:
    """A request whose blocks another engine pushes."""

    load: Loading
    address: bytes
    begun: float
    deadline: float
    connecting: Future[Peer] | None = None
    peer: Peer | None = None
    counter: ImmCounter | None = None
    stopping_until: float | None = None
    fence: Future[None] | None = None
    failed: str = ""
    cancelled: bool = False
    ended: bool = False


class Loads(NamedTuple):
    """What has ended: all requests, those that failed, and the blocks of these."""

    over: set[str]
    failed: set[str]
    blocks: set[int]


class Loadings:
    """All requests whose blocks other engines push to this worker."""

    def __init__(
        self, fabric: Fabric, mail: Mail, blocks: WorkerBlocks, rank: int, deadline_s: float, stats: FabricStats
    ) -> None:
        """Offer `blocks` to the worker of the same rank; a load that takes longer than `deadline_s` has failed."""
        self._fabric, self._mail, self._blocks, self._rank = fabric, mail, blocks, rank
        self._deadline_s, self._stats = deadline_s, stats
        self._beside = ThreadPoolExecutor(1, "asyncfabric-connecting")
        self._requests: dict[str, Incoming] = {}
        self._peers: dict[bytes, Peer] = {}
        self._checked = 0.0

    def begin(self, load: Loading) -> None:
        """Connect to the source of a request, and offer it blocks as soon as that is done."""
        now = time.monotonic()
        address = load.source.address(self._rank)
        found = Incoming(load, address, now, now + self._deadline_s)
        self._requests[load.request] = found
        found.connecting = self._connect(address)
        self._opened(found)

    def refuse(self, source: Source) -> None:
        """Have the source of a request that is not wanted give its blocks back."""
        self._beside.submit(self._refuse, source)

    def cancel(self, request: str) -> None:
        """Give a load up; its blocks are reported when nothing can arrive any more."""
        if found := self._requests.get(request):
            found.cancelled = True
            self._stop(found, "cancelled")

    def ended(self, message: Ended) -> None:
        """Take a source's confirmation that nothing of a transfer is under way."""
        for found in self._requests.values():
            if found.load.source.transfer == message.transfer and not self._arrived(found):
                found.ended = True
                found.failed = found.failed or message.reason

    def advance(self) -> Loads:
        """Look at every load; return those that have ended."""
        now = time.monotonic()
        look = now - self._checked > LOSS_CHECK_S
        if look:
            self._checked = now
        loads = Loads(set(), set(), set())
        for name, found in list(self._requests.items()):
            if found.connecting is not None:
                self._opened(found)
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

    def _opened(self, found: Incoming) -> None:
        assert found.connecting is not None
        if not found.connecting.done():
            return
        try:
            found.peer = self._peers[found.address] = found.connecting.result()
            if not found.failed:
                found.counter = self._fabric.counter()
                load = found.load
                offer = Offer(load.source.transfer, load.first, load.blocks, found.counter.imm, self._blocks.layout)
                self._mail.send(found.peer, offer)
            elif found.cancelled:
                self._mail.send(found.peer, Cancel(found.load.source.transfer))
                found.ended = True  # no block was ever offered
        except (FabricError, ValueError) as error:
            found.failed = found.failed or str(error)
            found.ended = found.counter is None  # no block was ever offered
            if found.counter is not None:
                self._cut(found)
        found.connecting = None

    def _over(self, found: Incoming, now: float, look: bool) -> bool:
        if found.connecting is not None:
            return False
        if found.ended or self._arrived(found):
            return True
        if found.fence is not None:
            return found.fence.done()
        if look and found.peer is not None and found.peer.lost:
            found.failed = found.failed or f"{found.peer!r} is lost"
            self._cut(found)
        elif found.stopping_until is not None:
            if now > found.stopping_until:
                self._cut(found)
        elif now > found.deadline:
            self._stop(found, f"not all blocks have arrived within {self._deadline_s:g} s")
        return False

    def _arrived(self, found: Incoming) -> bool:
        return found.counter is not None and found.counter.value >= self._need(found)

    def _need(self, found: Incoming) -> int:
        return len(found.load.blocks) * sum(map(len, self._blocks.layout.layers))

    def _stop(self, found: Incoming, reason: str) -> None:
        if found.stopping_until is not None or found.fence is not None:
            return
        found.failed = found.failed or reason
        found.stopping_until = time.monotonic() + CONFIRM_S
        if found.peer is not None:
            try:
                self._mail.send(found.peer, Cancel(found.load.source.transfer))
            except FabricError:
                self._cut(found)

    def _cut(self, found: Incoming) -> None:
        """Disconnect the source: what it still writes is refused from then on."""
        assert found.peer is not None
        peer = found.peer
        self._peers.pop(found.address, None)
        found.fence = self._beside.submit(self._fabric.disconnect, peer)

    def _report(self, found: Incoming, loads: Loads, now: float) -> None:
        whole = self._arrived(found)
        if found.counter is not None:
            found.counter.close()
        loads.over.add(found.load.request)
        if found.cancelled:
            self._stats.data[CANCELLED] += 1
        elif whole:
            count = self._need(found) * self._blocks.page_bytes
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
        try:
            peer = self._fabric.connect(source.address(self._rank))
            self._mail.send(peer, Cancel(source.transfer))
        except (FabricError, ValueError) as error:
            logger.info("transfer %s ends with its lease, since its source is not reached: %s", source.transfer, error)
