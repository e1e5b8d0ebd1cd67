"""What joins fake engines: delivers what they post, at once or when a test asks, in order, shuffled, or not at all.

No thread: an engine delivers inline from the thread that submits. One lock guards the network and everything behind
it, since engines reach into each other's memory here. Faults live here, the rules of transfers live in fake_ops.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncfabric._bridge.status import StatusCode
from asyncfabric.testing.fake_keys import FakeAddress

if TYPE_CHECKING:
    from asyncfabric.testing.fake_core import EngineCore
    from asyncfabric.testing.fake_ops import Leg, Op
    from asyncfabric.testing.fake_peers import FakePeer


class FakeNetwork:
    """Join several FakeEngines; engines of different networks cannot reach each other.

    Attributes:
        hold: keep posted work requests in flight until `deliver()` or `release()`.
        hold_control: the same for registration, allocation, connection set-up, revoke and release.
        window: work requests that one engine may have in flight; the rest of its ops stays unposted. None: no bound.
        request_bytes: longer writes are split into requests of this size.
        can_read: whether the rails can read.
        can_flush: whether a disconnected rail can report its requests; if not, their regions are quarantined.
    """

    def __init__(
        self,
        *,
        hold: bool = False,
        hold_control: bool = False,
        seed: int | None = None,
        window: int | None = None,
        request_bytes: int = 1 << 20,
        can_read: bool = True,
        can_flush: bool = True,
    ) -> None:
        self.hold: bool = hold
        self.hold_control: bool = hold_control
        self.window = window
        self.request_bytes = request_bytes
        self.can_read = can_read
        self.can_flush = can_flush
        self.lock: threading.RLock = threading.RLock()
        # Notified after each delivery, for spinning threads.
        self.changed: threading.Condition = threading.Condition(self.lock)
        self._random = random.Random(seed) if seed is not None else None
        self._engines: dict[int, EngineCore] = {}
        self._last_place = 0
        self._in_flight: list[Leg] = []
        self._blocked: list[Leg] = []  # set aside during one delivery: their receivers take no more messages now
        self._controls: deque[Callable[[], None]] = deque()
        self._leg_faults: deque[tuple[StatusCode, int]] = deque()
        self._control_faults: deque[tuple[StatusCode, int]] = deque()
        self._delivering = False

    # What a test does.

    @property
    def ordered(self) -> bool:
        """Whether requests of one engine arrive in the order of their posting."""
        return self._random is None

    @property
    def in_flight(self) -> int:
        """Return how many posted work requests and held control calls wait."""
        with self.lock:
            return len(self._in_flight) + len(self._blocked) + len(self._controls)

    def deliver(self, count: int | None = None) -> int:
        """Deliver up to `count` (all) of what is in flight, control calls first; return how many were."""
        with self.lock:
            if self._delivering:
                return 0  # a delivery posted more: the loop below is already going to see it
            self._delivering = True
            try:
                return self._deliver_all(count)
            finally:
                self._delivering = False
                self._in_flight[:0] = self._blocked
                self._blocked.clear()
                self.changed.notify_all()

    def release(self) -> int:
        """Stop holding and deliver everything."""
        with self.lock:
            self.hold = False
            self.hold_control = False
            return self.deliver()

    def fail_next(self, code: StatusCode = StatusCode.TRANSPORT, *, raw: int = 0, count: int = 1) -> None:
        """Let the next `count` work requests fail; their bytes do not arrive and nothing is counted."""
        with self.lock:
            self._leg_faults.extend([(code, raw)] * count)

    def fail_next_control(self, code: StatusCode, *, raw: int = 0, count: int = 1) -> None:
        """Let the next `count` control calls (register, allocate, connect, ...) fail without effect."""
        with self.lock:
            self._control_faults.extend([(code, raw)] * count)

    # What engines do; all of it under the lock.

    def join(self, engine: EngineCore, incarnation: int, place: int | None) -> FakeAddress:
        """Give an engine its address; `place` is that of a dead engine that it replaces."""
        if place is None:
            self._last_place += 1
            place = self._last_place
        elif place in self._engines:
            raise ValueError(f"place {place} is taken by a living engine")
        self._engines[place] = engine
        return FakeAddress(place, incarnation)

    def leave(self, engine: EngineCore) -> None:
        """Take an engine off: whatever was on the way to it fails, whatever it had sent is gone."""
        if self._engines.get(engine.fake_address.place) is not engine:
            return
        del self._engines[engine.fake_address.place]
        self._take(lambda leg: leg.sender is engine)
        for other in list(self._engines.values()):
            other.peer_left(engine.fake_address.incarnation)

    def find(self, address: FakeAddress) -> EngineCore | None:
        """Return the living engine of exactly this incarnation."""
        engine = self._engines.get(address.place)
        return engine if engine is not None and engine.fake_address == address else None

    def occupied(self, place: int) -> bool:
        """Whether some engine, of whatever incarnation, lives there."""
        return place in self._engines

    def post(self, leg: Leg) -> None:
        """Put a work request on the wire."""
        self._in_flight.append(leg)

    def pump(self) -> None:
        """Deliver now, unless the test holds the network."""
        if not self.hold:
            self.deliver()

    def control(self, call: Callable[[StatusCode, int], None]) -> None:
        """Run a control call with the status that it shall begin with, now or when the test delivers."""

        def run() -> None:
            call(*(self._control_faults.popleft() if self._control_faults else (StatusCode.OK, 0)))

        if self.hold_control:
            self._controls.append(run)
        else:
            run()

    def flush(self, sender: EngineCore, peer: FakePeer) -> list[Leg]:
        """Take back what `sender` has in flight to a peer; it can never touch memory again."""
        return self._take(lambda leg: leg.sender is sender and leg.peer is peer)

    def take_messages(self, sender: EngineCore) -> list[Leg]:
        """Take back the messages of `sender` that were not received."""
        return self._take(lambda leg: leg.sender is sender and leg.payload is not None)

    def peers_holding(self, op: Op) -> list[FakePeer]:
        """Return the peers that an op still waits for."""
        return [leg.peer for leg in (*self._in_flight, *self._blocked) if leg.op is op and leg.peer is not None]

    def counting(self, address: FakeAddress, imm: int) -> list[tuple[int, Op]]:
        """Return the ops of all engines that count for an imm there and have not ended, with their engine's number."""
        return [
            (engine.fake_address.incarnation, op)
            for engine in self._engines.values()
            for op in engine.ops.live.values()
            if (address, imm) in op.counts
        ]

    def _take(self, chosen: Callable[[Leg], bool]) -> list[Leg]:
        taken = [leg for leg in (*self._blocked, *self._in_flight) if chosen(leg)]
        self._in_flight = [leg for leg in self._in_flight if not chosen(leg)]
        self._blocked = [leg for leg in self._blocked if not chosen(leg)]
        return taken

    def _deliver_all(self, count: int | None) -> int:
        done = 0
        while count is None or done < count:
            if self._controls:
                self._controls.popleft()()
            elif self._in_flight:
                index = self._random.randrange(len(self._in_flight)) if self._random else 0
                leg = self._in_flight.pop(index)
                if not self._deliver(leg):
                    self._blocked.append(leg)
                    continue
            else:
                break
            done += 1
        return done

    def _deliver(self, leg: Leg) -> bool:
        target = self.find(leg.address)
        if self._leg_faults:
            code, raw = self._leg_faults.popleft()
        elif target is None:
            code, raw = StatusCode.PEER_DEAD, 0
        else:
            answer, raw = target.accept(leg), 0
            if answer is None:
                return False  # the receiver's message queue is full: back-pressure, not loss
            code = answer
        value = 0
        if code is StatusCode.NOT_TAKEN:
            others = (*self._in_flight, *self._blocked)
            value = 1 + sum(one.sender is leg.sender and one.address == leg.address for one in others)
        leg.sender.ops.finish(leg, code, raw, value)
        return True


DEFAULT_NETWORK = FakeNetwork()
"""The network of engines that were not given one."""
