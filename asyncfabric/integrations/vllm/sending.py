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
from asyncfabric.integrations.vllm.heads import may_exchange, targets_of, writes_of
from asyncfabric.integrations.vllm.layout import After, WorkerBlocks
from asyncfabric.integrations.vllm.messages import Cancel, Ended, Mail, Offer
from asyncfabric.integrations.vllm.statistics import EXPIRED, PUSH, PUSHED, FabricStats
from asyncfabric.integrations.vllm.steps import Computing

logger: logging.Logger = logging.getLogger(__name__)

REMEMBERED = 4096
"""Transfers that have ended, and offers and cancels that came early, of which the oldest are forgotten."""

CANCELLED_THERE = "the engine that decodes has cancelled the request"


@dataclass
class PushTarget:
    """A worker that a request's blocks are pushed to; `pushed`: how many of them, by layer."""

    pushed: list[int]
    peer: Peer | None = None
    offer: Offer | None = None
    keys: list[RegionKey] = field(default_factory=list)
    under_way: list[Transfer] = field(default_factory=list)
    stopped: str = ""
    answered: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of it was pushed."""
        return self.offer is not None and all(count >= len(self.offer.blocks) for count in self.pushed)


@dataclass
class Outgoing:
    """A request that is computed here for another engine; `ranks` and `targets` are known from the first offer on."""

    request: str
    transfer: str
    total: int
    blocks: list[int]
    computed: list[int]
    ranks: int = 0
    targets: dict[int, PushTarget] = field(default_factory=dict)
    begun_ns: int = 0
    bytes: int = 0
    stopped: str = ""
    held_until: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing is pushed any more, as far as the offers show."""
        if not self.ranks:
            return bool(self.stopped)
        return all(each.whole or each.stopped for each in self.targets.values())

    @property
    def under_way(self) -> list[Transfer]:
        """What reads its blocks."""
        return [each for target in self.targets.values() for each in target.under_way]


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
        self._kv_heads = int(blocks.layout.shape["kv_heads"])
        self._requests: dict[str, Outgoing] = {}
        self._transfers: dict[str, Outgoing] = {}
        self._early: OrderedDict[tuple[str, int], tuple[Peer, Offer | Cancel]] = OrderedDict()
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
                found = Outgoing(work.request, work.transfer, work.total, work.blocks, [0] * layers)
                self._requests[work.request] = self._transfers[work.transfer] = found
                for early in [each for each in self._early if each[0] == work.transfer]:
                    match self._early.pop(early):
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
            for target in found.targets.values():
                self._push(found, target, number)

    def finish_step(self) -> None:
        """Push what was not pushed layer by layer."""
        for number in range(len(self._blocks.layout.layers)):
            self.layer(number)
        self._step = []

    def hold(self, request: str, aborted: bool) -> None:
        """Keep the blocks of a finished request until they are pushed or its lease ends; stop if it was aborted."""
        found = self._requests.get(request)
        if found is None:  # aborted before its first step
            found = self._requests[request] = Outgoing(request, "", 0, [], [])
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
        """Take the blocks that a worker of another engine offers for a transfer, which may be yet to come."""
        rank, found = offer.layout.rank, self._transfers.get(offer.transfer)
        if found is None:
            if offer.transfer in self._ended:
                self._answer(peer, offer.transfer, self._ended[offer.transfer])
            elif isinstance(self._early.get((offer.transfer, rank), (peer, None))[1], Cancel):  # one in parts is late
                self._answer(peer, offer.transfer, CANCELLED_THERE)
            else:
                self._keep(peer, offer, rank)
            return
        target = self._target(found, peer, rank, offer.layout.ranks)
        if target is None:
            return
        if target.stopped:
            self._answer(peer, offer.transfer, target.stopped)
            return
        target.offer = offer
        needed = -(-found.total // self._tokens)
        if different := self._blocks.layout.differences(offer.layout):
            self._stop_target(found, target, f"the engines differ: {different}")
        elif offer.first + len(offer.blocks) != needed:
            reason = f"{offer.first} + {len(offer.blocks)} blocks were offered for a prompt of {needed}"
            self._stop_target(found, target, reason)
        else:
            try:
                target.keys = [RegionKey.from_bytes(key) for key in offer.layout.keys]
            except ValueError as error:
                self._stop_target(found, target, f"the offer is malformed: {error}")
            for number in range(len(found.computed)):
                self._push(found, target, number)

    def cancel(self, peer: Peer, cancel: Cancel) -> None:
        """Push no more of a transfer to a worker; the answer goes out when nothing of it is under way."""
        found = self._transfers.get(cancel.transfer)
        if found is None or cancel.transfer in self._ended:
            self._answer(peer, cancel.transfer, self._ended.get(cancel.transfer, CANCELLED_THERE))
            if cancel.transfer not in self._ended:
                self._keep(peer, cancel, cancel.rank)
            return
        target = self._target(found, peer, cancel.rank, cancel.ranks)
        if target is not None:
            target.answered = False
            self._stop_target(found, target, CANCELLED_THERE)

    def advance(self) -> set[str]:
        """Look at what is under way; return the requests whose blocks nothing reads any more."""
        over: set[str] = set()
        now = time.monotonic()
        for found in list(self._requests.values()):
            for target in found.targets.values():
                self._look(found, target)
            if not found.over and found.held_until is not None and now > found.held_until:
                self._expire(found)
            if found.under_way or not found.over:
                continue
            reason = found.stopped or next(
                (each.stopped for each in found.targets.values() if each.stopped), "all of it was pushed"
            )
            if found.transfer and found.transfer not in self._ended and (found.held_until is not None or found.stopped):
                self._remember(found.transfer, reason)
            if found.held_until is not None:
                if found.bytes and all(each.whole for each in found.targets.values()):
                    self._stats.moved(PUSH, found.request, found.begun_ns, time.monotonic_ns(), found.bytes)
                over.add(found.request)
                del self._requests[found.request]
                self._transfers.pop(found.transfer, None)
        return over

    def _expire(self, found: Outgoing) -> None:
        """Stop what nobody has asked for; pushes that began go on."""
        reason = f"no engine asked for its blocks within {self._lease_s:g} s"
        missing = [each for each in found.targets.values() if each.offer is None and not each.stopped]
        if not found.ranks:
            found.stopped = reason
        elif not missing:
            return
        for target in missing:
            target.stopped = reason
        self._stats.data[EXPIRED] += 1

    def _target(self, found: Outgoing, peer: Peer, rank: int, ranks: int) -> PushTarget | None:
        """Return the state of a worker that is pushed to; None, and an answer, for one that is not."""
        layout = self._blocks.layout
        if not found.ranks and not found.stopped and may_exchange(self._kv_heads, layout.ranks, ranks):
            found.ranks = ranks
            found.targets = {each: PushTarget([0] * len(found.computed)) for each in targets_of(layout, ranks)}
        target = found.targets.get(rank) if ranks == found.ranks else None
        if target is None:
            reason = found.stopped or f"worker {rank} of {ranks} gets nothing from worker {layout.rank}"
            self._answer(peer, found.transfer, reason)
        else:
            target.peer = peer
        return target

    def _keep(self, peer: Peer, message: Offer | Cancel, rank: int) -> None:
        self._early.pop((message.transfer, rank), None)
        self._early[message.transfer, rank] = (peer, message)
        while len(self._early) > REMEMBERED:
            self._early.popitem(last=False)

    def _push(self, found: Outgoing, target: PushTarget, number: int) -> None:
        offer = target.offer
        if offer is None or target.stopped or not target.keys:
            return
        end = min(found.computed[number], found.total)
        whole = -(-end // self._tokens) if end >= found.total else end // self._tokens
        begin, count = offer.first + target.pushed[number], whole - offer.first
        if count <= target.pushed[number]:
            return
        sources, targets = found.blocks[begin:whole], offer.blocks[target.pushed[number] : count]
        found.begun_ns = found.begun_ns or time.monotonic_ns()
        size = 0
        try:
            for write in writes_of(self._blocks.layout, offer.layout, number, sources, targets):
                transfer = self._fabric.write_pages(
                    self._blocks.regions[write.source_region],
                    write.sources,
                    target.keys[write.target_region],
                    write.targets,
                    page_bytes=write.page_bytes or self._blocks.page_bytes,
                    source_stride=write.source_stride,
                    target_stride=write.target_stride,
                    source_offset=write.source_offset,
                    target_offset=write.target_offset,
                    imm=offer.imm,
                    after=self._computes,
                )
                target.under_way.append(transfer)
                size += len(write.sources) * (write.page_bytes or self._blocks.page_bytes)
        except (FabricError, ValueError, IndexError) as error:  # the offer is another engine's
            self._stop_target(found, target, f"a push failed: {error}")
            return
        target.pushed[number] = count
        found.bytes += size
        self._stats.data[PUSHED] += size

    def _look(self, found: Outgoing, target: PushTarget) -> None:
        """Note which pushes are done, and answer a worker whose pushes were stopped and are all done."""
        open_ones = []
        for transfer in target.under_way:
            if not transfer.done:
                open_ones.append(transfer)
                continue
            try:
                transfer.wait(0)
            except FabricError as error:
                self._stop_target(found, target, f"a push failed: {error}")
        target.under_way = open_ones
        if target.stopped and not open_ones and not target.answered and target.peer is not None:
            target.answered = True
            self._answer(target.peer, found.transfer, target.stopped)

    def _stop(self, found: Outgoing, reason: str) -> None:
        """Push no more of a request to anybody."""
        if not found.stopped:
            found.stopped = reason
            for target in found.targets.values():
                self._stop_target(found, target, reason)

    def _stop_target(self, found: Outgoing, target: PushTarget, reason: str) -> None:
        if not target.stopped:
            target.stopped = reason
            logger.info("transfer %s of request %s stops: %s", found.transfer, found.request, reason)
            for transfer in target.under_way:
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
