"""KvInbox: the leaseholder's end of the protocol. Offers leases to sources, waits, cancels, and knows when to fence.

Runs on the event loop's thread. The rules are those of TargetMachine, the pages those of the pool; here they meet a
channel, the loss of peers, and time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import anyio

from asyncfabric import ClosedError, Fabric, FabricAddress, FabricError, Peer, PeerError, StaleKeyError, TransferError
from asyncfabric._groups import beside
from asyncfabric._notice import Notice
from asyncfabric.kv.channel import KvChannel, member_name
from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.lease import KvLease
from asyncfabric.kv.loss import PeerLoss
from asyncfabric.kv.messages import KvMessage
from asyncfabric.kv.pool import KvPool
from asyncfabric.kv.protocol import SourceVerdict, TargetMachine, TargetState
from asyncfabric.kv.relayout import writes_anything

logger: logging.Logger = logging.getLogger("asyncfabric.kv")

CONFIRM_S = 2.0
"""How long sources may take to confirm a cancellation before they are disconnected and fenced off."""


class KvRequest:
    """One lease that was offered to the ranks of a source; made by `async with inbox.request(...)`.

    Attributes:
        names: of the ranks, by the incarnation of their fabrics, as far as they were given.
        since: when it was made, on time.monotonic().
    """

    def __init__(
        self, lease: KvLease, machine: TargetMachine, addresses: dict[int, FabricAddress], names: dict[int, str]
    ) -> None:
        """Not for users: `async with inbox.request(...)`."""
        self.lease = lease
        self.machine = machine
        self.peers: dict[int, Peer] = {}
        self.names = names
        self.since: float = monotonic()
        self._addresses = addresses
        self._scopes: set[anyio.CancelScope] = set()
        self._changed = Notice()

    async def wait(self) -> None:
        """Return when all pages of all layers and the context have arrived.

        Raises:
            TransferError: a source refused or stopped; the text has its reason.
            PeerError: a source is lost.
            StaleKeyError: the pool was fenced meanwhile; ask again with a new lease.
            TimeoutError: the deadline of the lease has passed.

        Cancellation: only this wait ends; leaving the request cancels it at the sources.
        """
        await self._wait(None)

    async def wait_layer(self, layer: int) -> None:
        """Return when all pages of one layer have arrived; the request must have been made with `per_layer`.

        Raises:
            ValueError: no such layer, or layers are not counted one by one.
            TransferError, PeerError, StaleKeyError, TimeoutError: as for `wait`.

        Cancellation: as for `wait`.
        """
        await self._wait(layer)

    async def _wait(self, layer: int | None) -> None:
        lease = self.lease
        scope = anyio.CancelScope(deadline=lease.deadline)
        self._scopes.add(scope)
        if self.machine.over and not lease.arrived_all():
            scope.cancel()
        try:
            with scope:
                if layer is None:
                    await lease.wait()
                    self.machine.complete()
                else:
                    await lease.wait_layer(layer)
        except StaleKeyError:
            self.machine.fenced()
            raise
        finally:
            self._scopes.discard(scope)
        if scope.cancelled_caught:
            self._raise()

    def note(self) -> None:
        """The machine changed: wake waiters that wait in vain, unexpose the lease when there is proof."""
        if self.machine.reusable and (self.lease.exposed or self.lease.released):
            self.lease.unexpose()
        if self.machine.over:
            for scope in self._scopes:
                scope.cancel()
        self._changed.notify()

    async def decided(self) -> None:
        """Return when no source is left that may write and may still answer.

        Cancellation: only this wait ends.
        """
        while self.machine.undecided and not self.machine.reusable:
            await self._changed.wait()

    def _raise(self) -> None:
        machine, lease = self.machine, self.lease
        have = "" if lease.released else f"; {lease.arrived} of {lease.expected} pieces had arrived"
        if not machine.failure and machine.state is not TargetState.STREAMING:
            raise ClosedError(f"{lease!r} was cancelled{have}")
        if not machine.failure:
            raise TimeoutError(f"{lease!r} passed its deadline{have}; see fabric.why() for who did not deliver")
        text = f"{lease!r}: {machine.failure}{have}"
        if machine.verdicts.get(machine.failed_source) is SourceVerdict.LOST:
            raise PeerError(text, remedy="release the lease and ask another source with a new one")
        raise TransferError(text, remedy="the reason is the source's; other requests go on")


class KvInbox:
    """Offers leases of a pool to sources; made by `async with open_inbox(...)`.

    Attributes:
        forged: messages about a request by somebody who is no source of it; dropped and counted.
    """

    def __init__(self, fabric: Fabric, pool: KvPool, channel: KvChannel, confirm_s: float = CONFIRM_S) -> None:
        """Not for users: `async with open_inbox(...)`."""
        self.forged: int = 0
        self._fabric = fabric
        self._pool = pool
        self._channel = channel
        self._confirm_s = confirm_s
        self._requests: dict[int, KvRequest] = {}
        self._loss: PeerLoss | None = None

    @property
    def requests(self) -> tuple[KvRequest, ...]:
        """Requests whose sources may still write, or may still answer."""
        return tuple(self._requests.values())

    @asynccontextmanager
    async def request(
        self,
        lease: KvLease,
        sources: Sequence[FabricAddress],
        source: KvLayout,
        tokens: int,
        *,
        rotation: int = 0,
        per_layer: bool = False,
        trace: str = "",
        body: bytes = b"",
        names: Sequence[str] = (),
    ) -> AsyncIterator[KvRequest]:
        """Offer a lease to each rank of a source that has to write to it; leaving early cancels there.

        When the block is left, either no source can write to the pages any more, or the lease stays exposed: releasing
        it then quarantines its pages until there is proof.

        Args:
            lease: of the pool of this inbox.
            sources: addresses of the fabrics of all ranks of the source, in the order of ranks.
            source: the layout of any rank of it.
            tokens: tokens that the source is to deliver.
            rotation: which of the ranks with the same heads write; other numbers share the load.
            per_layer: count each layer by itself, for `wait_layer`.
            trace: W3C trace context; see asyncfabric.observe.spans.TraceContext.
            body: carried to the source, not looked at.
            names: of the ranks, in the order of their addresses, for `asyncfabric.kv.waiting`.

        Raises:
            ValueError: as KvLease.offer, or not one address (and name, where names are given) for each rank.

        Cancellation: on leaving, sources get a cancellation and have `confirm_s` to confirm, shielded; then it goes on.
        """
        if len(sources) != source.tp_size:
            raise ValueError(f"the source has {source.tp_size} ranks, got {len(sources)} addresses")
        if len(names) not in (0, len(sources)):
            raise ValueError(f"the source has {source.tp_size} ranks, got {len(names)} names")
        if len({address.incarnation for address in sources}) != len(sources):
            raise ValueError("two ranks of the source have the same address; each rank has a fabric of its own")
        layout = self._pool.layout
        addresses = {
            address.incarnation: address
            for rank, address in enumerate(sources)
            if writes_anything(source.at_rank(rank), layout, rotation)
        }
        offer = await lease.offer(source, tokens, rotation=rotation, per_layer=per_layer, trace=trace, body=body)
        machine = TargetMachine(offer.target, offer.lease, tuple(addresses))
        called = {address.incarnation: name for address, name in zip(sources, names, strict=False)}
        request = KvRequest(lease, machine, addresses, called)
        self._forget_unexposed()
        self._requests[offer.lease] = request
        unasked = set(addresses)
        try:
            for incarnation, address in addresses.items():
                try:
                    peer = await self._fabric.connect(address)
                    request.peers[incarnation] = peer
                    if self._loss is not None:
                        self._loss.watch(peer)
                    unasked.discard(incarnation)
                    await self._channel.send(member_name(address), offer)
                except FabricError as error:
                    machine.lose(incarnation, f"a source cannot be reached: {error}")
                    request.note()
            yield request
        finally:
            for incarnation in unasked:
                machine.spare(incarnation)
            await self._end(request)

    def handle(self, sender: int, message: KvMessage) -> bool:
        """Take a message of a source; returns False for one that is about no request of this inbox."""
        request = self._requests.get(message.lease)
        if request is None or message.target != self._fabric.address.incarnation:
            return False
        if not request.machine.receive(sender, message):
            self.forged += 1
            logger.warning("fabric %016x sent a %s for %r, of which it is no source", sender, message, request.lease)
            return True
        request.note()
        return True

    async def _end(self, request: KvRequest) -> None:
        """Cancel what is not complete; ends with proof, or with the sources disconnected."""
        machine, lease = request.machine, request.lease
        if lease.arrived_all():
            machine.complete()
        elif not lease.released and not lease.exposed:
            machine.fenced()
        if not machine.reusable:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(self._confirm_s):
                    for source, message in machine.cancel():
                        await self._send(request, int(str(source)), message)
                    await request.decided()
                for silent in machine.undecided:
                    machine.lose(silent, f"a source did not confirm within {self._confirm_s:g} s")
                    await self._disconnect(request.peers.get(int(str(silent))))
        request.note()
        if machine.reusable:
            self._requests.pop(machine.lease, None)

    async def _send(self, request: KvRequest, source: int, message: KvMessage) -> None:
        try:
            await self._channel.send(member_name(request._addresses[source]), message)
        except FabricError as error:
            request.machine.lose(source, f"a source cannot be reached to stop it: {error}")

    async def _disconnect(self, peer: Peer | None) -> None:
        if peer is None:
            return
        try:
            await self._fabric.disconnect(peer)
        except FabricError as error:
            logger.info("disconnecting %r: %s", peer, error)

    def _lost(self, incarnation: int, reason: str) -> None:
        for request in list(self._requests.values()):
            if incarnation in request.machine.verdicts:
                request.machine.lose(incarnation, f"a source is lost: {reason}")
                request.note()

    def _forget_unexposed(self) -> None:
        """Drop requests whose pages came back by a fence: a late message about them has nothing new."""
        quarantined = self._pool.ledger.quarantined
        for number, request in list(self._requests.items()):
            if request.lease.released and number not in quarantined:
                del self._requests[number]


@asynccontextmanager
async def open_inbox(
    fabric: Fabric, pool: KvPool, channel: KvChannel, *, confirm_s: float = CONFIRM_S
) -> AsyncIterator[KvInbox]:
    """Open the leaseholder's end; messages reach it through `deliver(channel, [inbox])` or `inbox.handle`.

    Args:
        fabric: the fabric of the pool.
        pool: whose leases are offered.
        channel: carries the messages to the sources; `open_kv_channel(fabric)` makes one.
        confirm_s: seconds that sources may take to confirm a cancellation.

    Cancellation: nothing of its own is shielded; requests end before the inbox does.
    """
    inbox = KvInbox(fabric, pool, channel, confirm_s)
    async with beside() as tasks:
        inbox._loss = PeerLoss(fabric, tasks, inbox._lost)
        try:
            yield inbox
        finally:
            inbox._loss.close()
