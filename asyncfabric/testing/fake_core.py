"""The state of a fake engine and what its parts report to it: deliveries, lost peers, ended ops, and the engine's end.

Every method with a leading underscore, and those that the network calls, run under the lock of the network. No call
of the engine protocol is made here except `kill`, which only a fake has; see fake_control and fake_engine.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import replace
from typing import Self

from asyncfabric._bridge.engine import CompletionKind
from asyncfabric._bridge.faults import MESSAGE_CREDITS
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.config import FabricConfig, RailSpec
from asyncfabric.testing.fake_completions import CompletionRing
from asyncfabric.testing.fake_counters import CounterTable, WatchTable
from asyncfabric.testing.fake_keys import FakeAddress, FakeKey
from asyncfabric.testing.fake_memory import RegionTable
from asyncfabric.testing.fake_network import DEFAULT_NETWORK, FakeNetwork
from asyncfabric.testing.fake_ops import Leg, OpTable
from asyncfabric.testing.fake_peers import PeerTable
from asyncfabric.testing.fake_ticker import Ticker
from asyncfabric.testing.fake_trace import TraceRing

_STATISTICS = (
    *("ops_submitted", "ops_completed", "ops_failed", "ops_cancelled", "bytes_written", "bytes_read", "work_requests"),
    *("immediates_sent", "immediates_received", "stale_arrivals", "early_arrivals", "messages_received"),
    *("messages_refused", "steps", "sleeps", "loop_wakes", "inline_steps", "regions", "registered_bytes", "peers"),
    "quarantined_regions",
    "unconfirmed_closes",
)


def _with_named_rails(config: FabricConfig) -> FabricConfig:
    """Return the configuration of a machine that has nothing but its memory, where "auto" is one rail."""
    return replace(config, rails=(RailSpec("local"), *config.rail_specs())) if config.automatic else config


class EngineCore:
    """What is behind the protocol of one fake engine."""

    def __init__(
        self, config: FabricConfig | None = None, network: FakeNetwork | None = None, *, place: int | None = None
    ) -> None:
        self.config: FabricConfig = _with_named_rails(config or FabricConfig())
        self.network: FakeNetwork = network if network is not None else DEFAULT_NETWORK
        self.counts: dict[str, int] = dict.fromkeys(_STATISTICS, 0)
        self.trace: TraceRing = TraceRing()
        self.regions: RegionTable = RegionTable()
        self.counters: CounterTable = CounterTable(self._counter_reached, self._closed, self.counts)
        self.watches: WatchTable = WatchTable(self._watch_changed)
        self.peer_table: PeerTable = PeerTable(self)
        self.ops: OpTable = OpTable(self)
        self._keys: dict[int, FakeKey] = {}
        self.keys_opened = 0
        self._messages: deque[tuple[int, bytes]] = deque()
        self._last_error = ""
        self._closing: int | None = None  # the cookie of submit_close
        self._close_until_ns = 0
        self._gone = False
        self._ticker = Ticker(self._tick)
        with self.network.lock:
            self.fake_address: FakeAddress = self.network.join(self, secrets.randbits(63) + 1, place)
            self.ring: CompletionRing = CompletionRing(self.counts)

    def kill(self) -> None:
        """Die as by kill -9: peers lose us, what was in flight is gone, each further call is refused as closed."""
        with self.network.lock:
            self._leave()

    # What the parts and the network call, under the lock.

    def accept(self, leg: Leg) -> StatusCode | None:
        """Take a delivery as the target; None when a message has no room yet."""
        if leg.payload is not None:
            sender = leg.sender.fake_address
            known = self.peer_table.of(sender.incarnation)
            if known is not None and sum(peer == known.id for peer, _ in self._messages) >= MESSAGE_CREDITS:
                return None if self._closing is None else StatusCode.NOT_TAKEN
            self._messages.append((self.peer_table.learn(sender).id, leg.payload))
            self.counts["messages_received"] += 1
            self.ring.push(CompletionKind.MESSAGE)
        code = leg.move(self) if leg.move is not None else StatusCode.OK
        if code is StatusCode.OK and leg.imm >= 0:
            self.counts["immediates_received"] += 1
            self.trace.point("arrival", leg.imm, leg.worth)
            self.counters.arrive(leg.imm, leg.stamp, leg.worth)
        return code

    def peer_left(self, incarnation: int) -> None:
        """Lose a peer that left the network."""
        peer = self.peer_table.of(incarnation)
        if peer is not None:
            self.peer_table.lose(peer)

    def op_ended(self) -> None:
        """End the closing of the engine with its last op."""
        if self._closing is not None and not self.ops.live:
            if not self._gone:
                self._leave()
            cookie, self._closing = self._closing, -1
            if cookie >= 0:
                self.ring.push(CompletionKind.CLOSED, cookie)

    def _leave(self) -> None:
        if not self._gone:
            self._gone = True
            self.network.leave(self)
            self.ops.abandon()
            self.network.changed.notify_all()

    def _tick(self) -> bool:
        with self.network.lock:
            now_ns = time.monotonic_ns()
            self.watches.look()
            self.ops.expire(now_ns)
            closes = self._closing is not None and self._closing >= 0
            if closes and now_ns >= self._close_until_ns:
                self.ops.end_untaken()
                closes = False
            return self.watches.armed or self.ops.draining or closes

    def _open(self) -> Self:
        if self._gone or self._closing is not None:
            raise refusal(StatusCode.CLOSED, "the engine is closed")
        return self

    def _ring(self) -> CompletionRing:
        if self.ring.fd < 0:
            raise refusal(StatusCode.CLOSED, "the engine is closed")
        return self.ring

    def _key(self, key: int) -> FakeKey:
        try:
            return self._keys[key]
        except KeyError:
            raise refusal(StatusCode.STALE_KEY, f"key {key} was closed or never existed") from None

    def _counter_reached(self, cookie: int, value: int) -> None:
        self.ring.push(CompletionKind.COUNTER, cookie, value=value)

    def _closed(self, cookie: int, imm: int) -> None:
        self.ring.push(CompletionKind.CONTROL, cookie, value=imm)

    def _watch_changed(self, cookie: int, value: int) -> None:
        self.ring.push(CompletionKind.WATCH, cookie, value=value)
