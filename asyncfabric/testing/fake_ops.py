"""The ops of a fake engine: from submission over legs in flight to exactly one completion each (INV-1, INV-2).

Every call is made under the lock of the network. An op completes only when none of its legs is in flight: cancelling
drops what was not posted and waits for the rest. Which bytes a leg moves was decided by fake_engine when it was made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncfabric._bridge.engine import CompletionKind, OpProgress
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing.fake_keys import FakeAddress
from asyncfabric.testing.fake_memory import FakeRegion
from asyncfabric.testing.fake_peers import FakePeer

if TYPE_CHECKING:
    from asyncfabric.testing.fake_core import EngineCore


@dataclass(slots=True, eq=False)
class Leg:
    """One work request: moves bytes, counts, or carries a message. `stamp`: the counter's generation when submitted."""

    sender: EngineCore
    address: FakeAddress
    length: int = 0
    rail: int = 0
    move: Callable[[EngineCore], StatusCode] | None = None
    imm: int = -1
    worth: int = 1
    opened: int = 0  # the number of the key that it goes by
    payload: bytes | None = None
    stamp: int = -1  # not known: its target was never met
    peer: FakePeer | None = None
    op: Op | None = None


@dataclass(slots=True, eq=False)
class Op:
    """One submitted transfer. `tail` is posted when all of `queue` arrived, so no count runs ahead of its bytes."""

    id: int
    cookie: int
    queue: deque[Leg]
    tail: list[Leg]
    regions: tuple[FakeRegion, ...]
    is_read: bool
    bytes_total: int
    started_ns: int = field(default_factory=time.monotonic_ns)
    bytes_posted: int = 0
    bytes_done: int = 0
    outstanding: int = 0
    rails: int = 0
    peer: int = 0
    failed_peer: int = 0
    code: StatusCode = StatusCode.OK
    raw: int = 0
    value: int = 0
    cancelled: bool = False
    cut: bool = False  # cancelling left something out: without it, everything arrived and the op did not fail
    drain_until_ns: int = 0
    counts: frozenset[tuple[FakeAddress, int]] = frozenset()  # where it counts, for which imm
    ended: list[Callable[[], None]] = field(default_factory=list)  # called once


class OpTable:
    """All ops of one engine that are not complete."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.live: dict[int, Op] = {}
        self._unposted: deque[Op] = deque()
        self._outstanding = 0
        self._last_id = 0
        self._writable: list[int] = []

    @property
    def full(self) -> bool:
        """Whether one more op would be refused: too many in flight, or too many completions that nobody took."""
        bound, live = self._engine.config.max_ops, len(self.live)
        return live >= bound or live + self._engine.ring.unpolled_ops >= 2 * bound

    def submit(
        self,
        cookie: int,
        legs: Iterable[Leg],
        tail: Iterable[Leg] = (),
        regions: tuple[FakeRegion, ...] = (),
        is_read: bool = False,
    ) -> int:
        """Enter an op and post what may be posted; without any leg it is complete at once."""
        if self.full:
            unpolled, bound = self._engine.ring.unpolled_ops, self._engine.config.max_ops
            text = f"{len(self.live)} ops in flight, {unpolled} completions not taken, max_ops is {bound}"
            raise refusal(StatusCode.BUSY, text)
        queue = deque(legs)
        self._last_id += 1
        op = Op(self._last_id, cookie, queue, list(tail), regions, is_read, sum(leg.length for leg in queue))
        for leg in (*queue, *op.tail):
            leg.op = op
            if leg.imm >= 0 and (target := self._engine.network.find(leg.address)) is not None:
                leg.stamp = target.counters.generation(leg.imm)
        op.counts = frozenset((leg.address, leg.imm) for leg in (*queue, *op.tail) if leg.imm >= 0)
        for region in regions:
            region.users += 1
        self.live[op.id] = op
        self._engine.counts["ops_submitted"] += 1
        self._engine.trace.point("start", cookie, sum(leg.length for leg in (*queue, *op.tail)))
        if queue:
            self._unposted.append(op)
        else:
            self._complete(op)
        if self._engine.config.polling != "manual":
            self.post_ready()
            self._engine.network.pump()
        return op.id

    def post_ready(self) -> int:
        """Post in the order of submission while the window allows; return how many legs were posted."""
        window, posted = self._engine.network.window, 0
        while self._unposted and (window is None or self._outstanding < window):
            op = self._unposted[0]
            if op.queue:
                self._post(op, op.queue.popleft())
                posted += 1
            else:
                self._unposted.popleft()
        return posted

    def _post(self, op: Op, leg: Leg) -> None:
        code, leg.peer = self._engine.peer_table.reach(leg.address, opened=leg.opened)
        target = self._engine.network.find(leg.address)
        if code is not StatusCode.OK or leg.peer is None or target is None:
            if code is StatusCode.STALE_KEY and leg.move is None:
                code = StatusCode.PEER_DEAD  # a signal or a message has no key: its peer was restarted
            self._fail(op, code, 0, leg.peer)
            self._settle(op)
            return
        op.peer = leg.peer.id
        op.outstanding += 1
        op.bytes_posted += leg.length
        op.rails |= 1 << leg.rail
        leg.peer.bytes_sent += 0 if op.is_read else leg.length
        self._outstanding += 1
        self._engine.counts["work_requests"] += 1
        if leg.imm >= 0:
            leg.stamp = leg.stamp if leg.stamp >= 0 else target.counters.generation(leg.imm)
            self._engine.counts["immediates_sent"] += 1
        self._engine.network.post(leg)

    def finish(self, leg: Leg, code: StatusCode, raw: int = 0, value: int = 0) -> None:
        """Take back a leg that can no longer touch memory."""
        op = leg.op
        assert op is not None, "a leg that was never submitted was in flight"
        op.outstanding -= 1
        self._outstanding -= 1
        if code is StatusCode.OK:
            op.bytes_done += leg.length
            self._engine.counts["bytes_read" if op.is_read else "bytes_written"] += leg.length
        else:
            op.value = value
            if code is StatusCode.NOT_TAKEN:
                op.bytes_posted = 0
            self._fail(op, code, raw, leg.peer)
        self._settle(op)
        self.post_ready()

    def _fail(self, op: Op, code: StatusCode, raw: int, peer: FakePeer | None) -> None:
        op.queue.clear()
        op.tail.clear()
        if op.code is StatusCode.OK:
            op.code, op.raw, op.failed_peer = code, raw, peer.id if peer is not None else 0

    def _settle(self, op: Op) -> None:
        if op.outstanding or op.queue or op.id not in self.live:
            return
        if op.tail:
            op.queue.extend(op.tail)
            op.tail.clear()
            self._unposted.append(op)
        else:
            self._complete(op)

    def _complete(self, op: Op) -> None:
        del self.live[op.id]
        code = op.code
        if op.cut and code is not StatusCode.DRAIN_TIMEOUT:
            code = StatusCode.CANCELLED
        ending = {StatusCode.OK: "ops_completed", StatusCode.CANCELLED: "ops_cancelled"}.get(code, "ops_failed")
        self._engine.counts[ending] += 1
        self._engine.trace.point("finish", op.cookie, op.bytes_done)
        self._engine.ring.push(
            CompletionKind.OP,
            op.cookie,
            code,
            raw=op.raw,
            value=op.value,
            bytes=op.bytes_done,
            duration_ns=time.monotonic_ns() - op.started_ns,
            rails=op.rails,
            peer=op.failed_peer,
        )
        for region in op.regions:
            region.users -= 1
            self._engine.regions.settle(region)
        for ended in op.ended:
            ended()
        self.notify_writable()
        self._engine.op_ended()

    def cancel(self, op_id: int) -> None:
        """Stop posting and complete once nothing is in flight; too late for an op that is complete."""
        op = self.live.get(op_id)
        if op is None or op.cancelled:
            return
        op.cancelled, op.cut = True, bool(op.queue or op.tail)
        op.queue.clear()
        op.tail.clear()
        self.drain(op)
        self._settle(op)

    def drain(self, op: Op) -> None:
        """Give what is in flight a last deadline."""
        deadline_ns = time.monotonic_ns() + int(self._engine.config.drain_deadline * 1e9)
        op.drain_until_ns = op.drain_until_ns or deadline_ns

    def drain_all(self) -> None:
        """Bring every op to its end, because the engine closes at once."""
        for op in list(self.live.values()):
            if op.queue or op.tail or not op.outstanding:
                self.cancel(op.id)
            else:
                self.drain(op)

    def end_untaken(self) -> None:
        """End the messages that no peer took, because the engine closes."""
        legs = self._engine.network.take_messages(self._engine)
        for leg in legs:
            self.finish(leg, StatusCode.NOT_TAKEN, value=sum(other.address == leg.address for other in legs))

    @property
    def draining(self) -> bool:
        """Whether some op has a drain deadline."""
        return any(op.drain_until_ns for op in self.live.values())

    def expire(self, now_ns: int) -> int:
        """Disconnect the peers of ops that did not drain in time; return how many ops that were."""
        late = [op for op in self.live.values() if 0 < op.drain_until_ns <= now_ns]
        for op in late:
            if not self._engine.network.can_flush:
                op.code = StatusCode.DRAIN_TIMEOUT
                for region in op.regions:
                    region.quarantined = True
            if not op.outstanding:
                self.cancel(op.id)
            for peer in self._engine.network.peers_holding(op):
                self._engine.peer_table.lose(peer)
        return len(late)

    def abandon(self) -> None:
        """Complete everything as closed: the engine is gone, and with it whatever it had in flight."""
        for op in list(self.live.values()):
            op.queue.clear()
            op.tail.clear()
            op.outstanding = 0
            op.code = StatusCode.CLOSED
            self._complete(op)
        self._unposted.clear()
        self._outstanding = 0

    def arm_writable(self, cookie: int) -> None:
        """Notify once when a slot is free."""
        self._writable.append(cookie)
        self.notify_writable()

    def notify_writable(self) -> None:
        """Notify who waits for a slot when there is one."""
        if self._writable and not self.full:
            cookies, self._writable = self._writable, []
            for cookie in cookies:
                self._engine.ring.push(CompletionKind.WRITABLE, cookie)

    def in_flight_to(self, peer_id: int) -> int:
        """Return how many ops were last posted to a peer and are not complete."""
        return sum(op.peer == peer_id for op in self.live.values())

    def progress(self, op_id: int) -> OpProgress:
        """Return how far an op is; not `known` once it is complete."""
        op = self.live.get(op_id)
        if op is None:
            return OpProgress(0, 0, 0, 0, 0, False)
        return OpProgress(op.bytes_total, op.bytes_posted, op.bytes_done, op.outstanding, op.peer, True)
