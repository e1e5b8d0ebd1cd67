"""The worker of an engine that prefills: pushes the blocks of each layer into those that another engine offers.

One thread at a time; never waits, but for requests that are preempted. A push is submitted once the layer is computed
and the offer is here, whichever comes last: by the engine's thread, or by the one that reads messages. Blocks of a
request are given back when nothing reads them any more.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from asyncfabric import Peer, RegionKey
from asyncfabric.blocking import Fabric, Transfer, wait_all
from asyncfabric.errors import FabricError
from asyncfabric.integrations.vllm.layout import After, WorkerBlocks
from asyncfabric.integrations.vllm.messages import Cancel, Ended, Mail, Offer
from asyncfabric.integrations.vllm.statistics import EXPIRED, PUSH, PUSHED, FabricStats
from asyncfabric.integrations.vllm.steps import Computing

logger: logging.Logger = logging.getLogger(__name__)

REMEMBERED = 4096
"""Transfers that have ended, and offers and cancels that came early, of which the oldest are forgotten."""

CANCELLED_THERE = "the engine that decodes has cancelled the request"


@dataclass
class Outgoing:
    """A request that is computed here for another engine."""

    request: str
    transfer: str
    total: int
    blocks: list[int]
    computed: list[int]
    pushed: list[int]
    offer: Offer | None = None
    peer: Peer | None = None
    keys: list[RegionKey] = field(default_factory=list)
    under_way: list[Transfer] = field(default_factory=list)
    begun_ns: int = 0
    bytes: int = 0
    stopped: str = ""
    held_until: float | None = None


class Sending:
    """All requests that this worker computes for others."""

    def __init__(
        self,
        fabric: Fabric,
        mail: Mail,
        blocks: WorkerBlocks,
        tokens: int,
        lease_s: float,
        stats: FabricStats,
        after: After,
    ) -> None:
        """Push from `blocks` of `tokens` tokens; keep them for `lease_s` seconds while no offer comes.

        `after` is called by the engine's thread alone: what computes is that thread's current stream.
        """
        self._fabric, self._mail, self._blocks, self._tokens = fabric, mail, blocks, tokens
        self._lease_s, self._stats, self._after = lease_s, stats, after
        self._requests: dict[str, Outgoing] = {}
        self._transfers: dict[str, Outgoing] = {}
        self._early: OrderedDict[str, tuple[Peer, Offer | Cancel]] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._step: list[tuple[Outgoing, int]] = []
        self._computes: object = None

    def begin(self, computing: list[Computing]) -> None:
        """Take what the next step computes."""
        layers = len(self._blocks.layout.layers)
        self._step = []
        self._computes = self._after()
        for work in computing:
            found = self._requests.get(work.request)
            if found is None:
                zeros = [0] * layers
                found = Outgoing(work.request, work.transfer, work.total, work.blocks, zeros, list(zeros))
                self._requests[work.request] = self._transfers[work.transfer] = found
                match self._early.pop(work.transfer, None):
                    case (peer, Offer() as offer):
                        self.accept(peer, offer)
                    case (peer, Cancel() as cancel):
                        self.cancel(peer, cancel)
            found.blocks = work.blocks
            self._step.append((found, work.end))

    def layer(self, number: int) -> None:
        """Push what the step has computed of a layer."""
        self._computes = self._after()
        for found, end in self._step:
            found.computed[number] = max(found.computed[number], end)
            self._push(found, number)

    def finish_step(self) -> None:
        """Push what was not pushed layer by layer."""
        for number in range(len(self._blocks.layout.layers)):
            self.layer(number)
        self._step = []

    def hold(self, request: str, aborted: bool) -> None:
        """Keep the blocks of a finished request until they are pushed or its lease ends; stop if it was aborted."""
        found = self._requests.get(request)
        if found is None:  # aborted before its first step
            found = self._requests[request] = Outgoing(request, "", 0, [], [], [])
        found.held_until = time.monotonic() + self._lease_s
        if aborted:
            self._stop(found, "the engine that prefills has aborted the request")

    def preempt(self, requests: list[str]) -> None:
        """Return when nothing reads the blocks of these requests, which are about to be overwritten."""
        for name in requests:
            if found := self._requests.get(name):
                try:
                    wait_all(found.under_way)
                except FabricError:
                    pass  # advance() finds it
                found.computed, found.blocks = [0] * len(found.computed), []  # an offer that comes now pushes nothing

    def accept(self, peer: Peer, offer: Offer) -> None:
        """Take the blocks that another engine offers for a transfer, which may be yet to come."""
        found = self._transfers.get(offer.transfer)
        if found is None:
            if offer.transfer in self._ended:
                self._answer(peer, offer.transfer, self._ended[offer.transfer])
            elif isinstance(self._early.get(offer.transfer, (peer, None))[1], Cancel):  # an offer in parts comes later
                self._answer(peer, offer.transfer, CANCELLED_THERE)
            else:
                self._keep(peer, offer)
            return
        found.peer, found.offer = peer, offer
        needed = -(-found.total // self._tokens)
        if different := self._blocks.layout.differences(offer.layout):
            self._stop(found, f"the engines differ: {different}")
        elif offer.first + len(offer.blocks) != needed:
            self._stop(found, f"{offer.first} + {len(offer.blocks)} blocks were offered for a prompt of {needed}")
        else:
            try:
                found.keys = [RegionKey.from_bytes(key) for key in offer.layout.keys]
            except ValueError as error:
                self._stop(found, f"the offer is malformed: {error}")
            for number in range(len(found.computed)):
                self._push(found, number)

    def cancel(self, peer: Peer, cancel: Cancel) -> None:
        """Push no more of a transfer; the answer goes out when nothing of it is under way."""
        found = self._transfers.get(cancel.transfer)
        if found is None or cancel.transfer in self._ended:
            self._answer(peer, cancel.transfer, self._ended.get(cancel.transfer, CANCELLED_THERE))
            if cancel.transfer not in self._ended:
                self._keep(peer, cancel)
            return
        found.peer = peer
        self._stop(found, CANCELLED_THERE)

    def advance(self) -> set[str]:
        """Look at what is under way; return the requests whose blocks nothing reads any more."""
        over: set[str] = set()
        now = time.monotonic()
        for found in list(self._requests.values()):
            self._look(found)
            if found.under_way:
                continue
            whole = found.offer is not None and all(count >= len(found.offer.blocks) for count in found.pushed)
            expired = found.offer is None and found.held_until is not None and now > found.held_until
            if expired and not found.stopped:
                self._stats.data[EXPIRED] += 1
                found.stopped = f"no engine asked for its blocks within {self._lease_s:g} s"
            if found.stopped and found.transfer and found.transfer not in self._ended:
                if found.peer is not None:
                    self._answer(found.peer, found.transfer, found.stopped)
                self._remember(found.transfer, found.stopped)
            if (whole or found.stopped) and found.held_until is not None:
                if whole and found.bytes:
                    self._stats.moved(PUSH, found.request, found.begun_ns, time.monotonic_ns(), found.bytes)
                over.add(found.request)
                del self._requests[found.request]
                self._transfers.pop(found.transfer, None)
                self._remember(found.transfer, found.stopped or "all of it was pushed")
        return over

    def _keep(self, peer: Peer, message: Offer | Cancel) -> None:
        self._early.pop(message.transfer, None)
        self._early[message.transfer] = (peer, message)
        while len(self._early) > REMEMBERED:
            self._early.popitem(last=False)

    def _push(self, found: Outgoing, number: int) -> None:
        offer = found.offer
        if offer is None or found.stopped or not found.keys:
            return
        end = min(found.computed[number], found.total)
        whole = -(-end // self._tokens) if end >= found.total else end // self._tokens
        begin, count = offer.first + found.pushed[number], whole - offer.first
        if count <= found.pushed[number]:
            return
        sources, targets = found.blocks[begin:whole], offer.blocks[found.pushed[number] : count]
        mine, theirs = self._blocks.layout.layers[number], offer.layout.layers[number]
        found.begun_ns = found.begun_ns or time.monotonic_ns()
        try:
            for here, there in zip(mine, theirs, strict=True):
                transfer = self._fabric.write_pages(
                    self._blocks.regions[here.region],
                    sources,
                    found.keys[there.region],
                    targets,
                    page_bytes=self._blocks.page_bytes,
                    source_stride=here.stride,
                    target_stride=there.stride,
                    source_offset=here.offset,
                    target_offset=there.offset,
                    imm=offer.imm,
                    after=self._computes,
                )
                found.under_way.append(transfer)
        except (FabricError, ValueError, IndexError) as error:  # the offer is another engine's
            self._stop(found, f"a push failed: {error}")
            return
        found.pushed[number] = count
        size = len(sources) * self._blocks.page_bytes * len(mine)
        found.bytes += size
        self._stats.data[PUSHED] += size

    def _look(self, found: Outgoing) -> None:
        open_ones = []
        for transfer in found.under_way:
            if not transfer.done:
                open_ones.append(transfer)
                continue
            try:
                transfer.wait(0)
            except FabricError as error:
                self._stop(found, f"a push failed: {error}")
        found.under_way = open_ones

    def _stop(self, found: Outgoing, reason: str) -> None:
        if not found.stopped:
            found.stopped = reason
            logger.info("transfer %s of request %s stops: %s", found.transfer, found.request, reason)
            for transfer in found.under_way:
                transfer.cancel()

    def _answer(self, peer: Peer, transfer: str, reason: str) -> None:
        try:
            self._mail.send(peer, Ended(transfer, reason))
        except FabricError as error:
            logger.info("%r gets no answer about transfer %s: %s", peer, transfer, error)

    def _remember(self, transfer: str, reason: str) -> None:
        self._ended[transfer] = reason
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
