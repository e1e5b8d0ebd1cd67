"""Control calls and look-ups of a fake engine: regions, keys, addresses, connections, closing.

Any thread may call. Control calls end as CONTROL completions, at once or when the test lets the network deliver;
look-ups answer at once. Each call is documented in `asyncfabric._bridge.engine.Engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncfabric._bridge.engine import CompletionKind, KeyInfo, OpProgress, RegionInfo
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing.fake_core import EngineCore
from asyncfabric.testing.fake_keys import FakeAddress, FakeKey
from asyncfabric.testing.fake_memory import FakeRegion
from asyncfabric.testing.fake_peers import PeerState

_HOST = -1
_MAX_ALLOCATION = 1 << 46


class ControlCalls(EngineCore):
    """The part of the protocol that moves no data."""

    # Look-ups.

    def address(self) -> bytes:
        """Return the bytes by which others find this engine."""
        return self.fake_address.pack()

    def incarnation(self) -> int:
        """Return the random number of this run."""
        return self.fake_address.incarnation

    def rails(self) -> list[dict[str, Any]]:
        """Return one row per rail of the configuration; `fake+` in the provider states what they are."""
        facts = {"library": "", "version": "", "gbits_per_s": 0.0, "ordered": self.network.ordered}
        facts |= {"can_read": self.network.can_read, "can_gather": False, "up": not self._gone}
        facts |= {"reason": "named", "admission": "open" if self.config.secret is None else "secret"}
        return [
            {"provider": f"fake+{spec.provider}", "device": spec.device, **facts} for spec in self.config.rail_specs()
        ]

    def rails_left_out(self) -> list[dict[str, str]]:
        """Return nothing: a fake opens what is named, and one rail for "auto"."""
        return []

    def peers(self) -> list[dict[str, Any]]:
        """Return one row per engine that was ever met."""
        with self.network.lock:
            rails = len(self.config.rails)
            return [
                {
                    "id": peer.id,
                    "incarnation": peer.address.incarnation,
                    "state": int(peer.state),
                    "lanes": rails,
                    "provider": self.rails()[0]["provider"],
                    "bytes_sent": peer.bytes_sent,
                    "ops_in_flight": self.ops.in_flight_to(peer.id),
                }
                for peer in self.peer_table.known.values()
            ]

    def statistics(self) -> dict[str, int]:
        """Return the counters, by the names of the native struct."""
        with self.network.lock:
            regions = self.regions.live.values()
            return self.counts | {
                "regions": len(regions),
                "registered_bytes": sum(region.length for region in regions),
                "quarantined_regions": sum(region.quarantined for region in regions),
                "peers": sum(peer.state is PeerState.CONNECTED for peer in self.peer_table.known.values()),
            }

    def progress(self, op: int) -> OpProgress:
        """Return how far an op is."""
        with self.network.lock:
            return self.ops.progress(op)

    def last_error(self) -> str:
        """Return the newest sentence about a failed control call."""
        return self._last_error

    def reason(self, cookie: int) -> str:
        """Return why a data call ended badly beyond its status: nothing, the fake refuses no memory for a reason."""
        return ""

    def check_address(self, address: bytes) -> int:
        """Parse an address and return its incarnation."""
        return FakeAddress.unpack(address).incarnation

    def region_info(self, region: int) -> RegionInfo:
        """Return a region as the engine sees it."""
        with self.network.lock:
            found = self.regions.find(region)
            return RegionInfo(found.base, found.length, _HOST, found.access, found.generation, found.quarantined)

    def region_key(self, region: int, access: int, offset: int, length: int, strict: bool = False) -> bytes:
        """Return the bytes of a key for a part of a region; the owner enforces the range of each, strict or not."""
        with self.network.lock:
            found = self.regions.find(region)
            self.regions.check(found, offset, length)
            if access & ~found.access:
                raise refusal(StatusCode.ACCESS_DENIED, f"access {access} of a region with access {found.access}")
            where = (self.fake_address.place, self.fake_address.incarnation, found.id, found.generation, found.secret)
            return FakeKey(*where, offset, length, access, len(self.config.rails)).pack()

    def region_memory(self, region: int) -> memoryview:
        """Return the writable bytes of an allocated region; they outlive the region."""
        with self.network.lock:
            found = self.regions.find(region)
            if found.memory is None:
                raise refusal(StatusCode.INVALID_ARGUMENT, f"region {region} is memory of the caller, who can see it")
            return memoryview(found.memory)  # keeps the pages alive, also after release

    def open_key(self, key: bytes) -> tuple[int, KeyInfo]:
        """Parse a key that a peer sent; returns its handle and what it states."""
        parsed = FakeKey.unpack(key)
        with self.network.lock:
            self.keys_opened += 1
            self._keys[self.keys_opened] = replace(parsed, opened=self.keys_opened)
            what = (parsed.incarnation, parsed.region, parsed.generation, parsed.length, parsed.access, parsed.rails)
            return self.keys_opened, KeyInfo(*what)

    def close_key(self, key: int) -> None:
        """Forget a key; idempotent."""
        with self.network.lock:
            self._keys.pop(key, None)

    def peer_of_key(self, key: int) -> int:
        """Return the peer that owns the key's memory, 0 when the next use of the key connects."""
        with self.network.lock:
            parsed = self._keys.get(key)
            peer = self.peer_table.of(parsed.incarnation) if parsed is not None else None
            return peer.id if peer is not None and peer.state is not PeerState.DISCONNECTED else 0

    def key_memory(self, key: int) -> memoryview | None:
        """Return None: no memory is mapped."""

    # Control calls.

    def submit_register(self, cookie: int, address: int, length: int, device: int, access: int) -> None:
        """Register memory of the caller, who keeps it alive."""
        if address <= 0:
            raise refusal(StatusCode.INVALID_ARGUMENT, f"address {address}")
        self._submit_memory(cookie, length, device, access, lambda: self.regions.add(address, length, access))

    def submit_allocate(self, cookie: int, length: int, device: int, access: int) -> None:
        """Allocate zeroed pages of the engine's own."""
        if length > _MAX_ALLOCATION:
            raise refusal(StatusCode.INVALID_ARGUMENT, f"{length} bytes, at most {_MAX_ALLOCATION} can be allocated")
        self._submit_memory(cookie, length, device, access, lambda: self.regions.allocate(length, access))

    def _submit_memory(
        self, cookie: int, length: int, device: int, access: int, make: Callable[[], FakeRegion]
    ) -> None:
        if length <= 0 or device < _HOST or not 0 <= access <= 3:
            raise refusal(StatusCode.INVALID_ARGUMENT, f"length {length}, device {device}, access {access}")

        def run() -> tuple[StatusCode, int, str]:
            if device != _HOST:
                return StatusCode.NO_PROVIDER, 0, f"a fake engine has no device {device}"
            try:
                return StatusCode.OK, make().id, ""
            except (OSError, OverflowError) as refused:
                return StatusCode.NO_MEMORY, 0, f"{length} bytes: {refused}"

        self._control(cookie, run)

    def submit_revoke(self, cookie: int, region: int) -> None:
        """Make every key of a region stale."""
        with self.network.lock:
            found = self._open().regions.find(region)

            def run() -> tuple[StatusCode, int, str]:
                self.regions.revoke(found)
                return StatusCode.OK, found.id, ""

            self._control(cookie, run)

    def submit_release(self, cookie: int, region: int) -> None:
        """Forget a region once nothing can touch its memory."""
        with self.network.lock:
            found = self.regions.find(region)  # also while closing: memory must be releasable to the end

            def done(code: StatusCode) -> None:
                self._end_control(cookie, code, 0, found.id, f"region {found.id} is quarantined" if code else "")

            def run(code: StatusCode, raw: int) -> None:
                if code is StatusCode.OK:
                    self.regions.release(found, done)
                else:
                    self._end_control(cookie, code, raw, 0, "release failed")

            self.network.control(run)

    def submit_connect(self, cookie: int, address: bytes) -> None:
        """Connect to an address; the completion names the peer."""
        parsed = FakeAddress.unpack(address)

        def run() -> tuple[StatusCode, int, str]:
            code, peer = self.peer_table.reach(parsed, by_name=True)
            if code is StatusCode.STALE_KEY:
                return StatusCode.PEER_REJECTED, 0, "another incarnation lives at this address"
            if code is StatusCode.SECRET_REFUSED:
                return code, 0, "their secrets differ"
            if code is not StatusCode.OK or peer is None:
                return StatusCode.PEER_UNREACHABLE, 0, "nobody lives at this address"
            return StatusCode.OK, peer.id, ""

        self._control(cookie, run)

    def submit_disconnect(self, cookie: int, peer: int) -> None:
        """Take back what is in flight to a peer and drop it."""
        with self.network.lock:
            found = self._open().peer_table.find(peer)

            def run() -> tuple[StatusCode, int, str]:
                self.peer_table.lose(found, PeerState.DISCONNECTED)
                return StatusCode.OK, found.id, ""

            self._control(cookie, run)

    def submit_close(self, cookie: int, cancel_unposted: bool) -> None:
        """Refuse new work, drain the old, leave the network; called again with `cancel_unposted`, stop posting."""
        with self.network.lock:
            if self._closing is None:
                self._closing = cookie
                self._close_until_ns = time.monotonic_ns() + int(self.config.drain_deadline * 1e9)
            elif not cancel_unposted:
                raise refusal(StatusCode.CLOSED, "the engine is closing already")
            if cancel_unposted:
                self.ops.drain_all()
            self.network.pump()  # whoever waits for room here is refused
            self._ticker.start()
            self.op_ended()

    def _control(self, cookie: int, call: Callable[[], tuple[StatusCode, int, str]]) -> None:
        with self.network.lock:
            self._open()

            def run(code: StatusCode, raw: int) -> None:
                if self._gone:
                    code = StatusCode.CLOSED
                value, detail = 0, "a fault was asked for"
                if code is StatusCode.OK:
                    code, value, detail = call()
                self._end_control(cookie, code, raw, value, detail)

            self.network.control(run)

    def _end_control(self, cookie: int, code: StatusCode, raw: int, value: int, detail: str) -> None:
        if code is not StatusCode.OK:
            self._last_error = f"{code.text}: {detail}"
        self.ring.push(CompletionKind.CONTROL, cookie, code, raw=raw, value=value)
