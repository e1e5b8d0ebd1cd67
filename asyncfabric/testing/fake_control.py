"""Control calls and look-ups of a fake engine: regions, keys, addresses, connections, closing.

Any thread may call. Control calls end as CONTROL completions, at once or when the test lets the network deliver; look-ups
answer at once. Each call is documented in `asyncfabric._bridge.engine.Engine`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from asyncfabric._bridge.engine import CompletionKind, KeyInfo, OpProgress, RegionInfo
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing.fake_core import EngineCore
from asyncfabric.testing.fake_keys import FakeAddress, FakeKey
from asyncfabric.testing.fake_memory import FakeRegion
from asyncfabric.testing.fake_peers import PeerState

_HOST = -1


class ControlCalls(EngineCore):
    """The part of the protocol that moves no data."""

    # Look-ups.

    def address(self) -> bytes:
        return self.fake_address.pack()

    def incarnation(self) -> int:
        return self.fake_address.incarnation

    def rails(self) -> list[dict[str, Any]]:
        facts = {"library": "", "version": "", "gbits_per_s": 0.0, "ordered": self.network.ordered}
        facts |= {"can_read": self.network.can_read, "up": not self._gone}
        return [{"provider": f"fake+{spec.provider}", "device": spec.device, **facts} for spec in self.config.rail_specs()]

    def peers(self) -> list[dict[str, Any]]:
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
        with self.network.lock:
            regions = self.regions.live.values()
            return self.counts | {
                "regions": len(regions),
                "registered_bytes": sum(region.length for region in regions),
                "quarantined_regions": sum(region.quarantined for region in regions),
                "peers": sum(peer.state is PeerState.CONNECTED for peer in self.peer_table.known.values()),
            }

    def progress(self, op: int) -> OpProgress:
        with self.network.lock:
            return self.ops.progress(op)

    def last_error(self) -> str:
        return self._last_error

    def check_address(self, address: bytes) -> int:
        return FakeAddress.unpack(address).incarnation

    def region_info(self, region: int) -> RegionInfo:
        with self.network.lock:
            found = self.regions.find(region)
            return RegionInfo(found.base, found.length, _HOST, found.access, found.generation, found.quarantined)

    def region_key(self, region: int, access: int, offset: int, length: int) -> bytes:
        with self.network.lock:
            found = self.regions.find(region)
            self.regions.check(found, offset, length)
            if not access or access & ~found.access:
                raise refusal(StatusCode.INVALID_ARGUMENT, f"access {access} of a region with access {found.access}")
            where = (self.fake_address.place, self.fake_address.incarnation, found.id, found.generation, found.secret)
            return FakeKey(*where, offset, length, access, len(self.config.rails)).pack()

    def region_memory(self, region: int) -> memoryview:
        with self.network.lock:
            found = self.regions.find(region)
            if found.memory is not None:
                return memoryview(found.memory)  # keeps the pages alive, also after release
            return memoryview((ctypes.c_ubyte * found.length).from_address(found.base)).cast("B")

    def open_key(self, key: bytes) -> tuple[int, KeyInfo]:
        parsed = FakeKey.unpack(key)
        with self.network.lock:
            self._last_key += 1
            self._keys[self._last_key] = parsed
            what = (parsed.incarnation, parsed.region, parsed.generation, parsed.length, parsed.access, parsed.rails)
            return self._last_key, KeyInfo(*what)

    def close_key(self, key: int) -> None:
        with self.network.lock:
            self._keys.pop(key, None)

    def peer_of_key(self, key: int) -> int:
        with self.network.lock:
            peer = self.peer_table.of(self._key(key).incarnation)
            return peer.id if peer is not None else 0

    # Control calls.

    def submit_register(self, cookie: int, address: int, length: int, device: int, access: int) -> None:
        if address <= 0:
            raise refusal(StatusCode.INVALID_ARGUMENT, f"address {address}")
        self._submit_memory(cookie, length, device, access, lambda: self.regions.add(address, length, access))

    def submit_allocate(self, cookie: int, length: int, device: int, access: int) -> None:
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
        with self.network.lock:
            found = self._open().regions.find(region)

            def run() -> tuple[StatusCode, int, str]:
                self.regions.revoke(found)
                return StatusCode.OK, found.id, ""

            self._control(cookie, run)

    def submit_release(self, cookie: int, region: int) -> None:
        with self.network.lock:
            found = self._open().regions.find(region)

            def done(code: StatusCode) -> None:
                self._end_control(cookie, code, 0, found.id, f"region {found.id} is quarantined" if code else "")

            def run(code: StatusCode, raw: int) -> None:
                if code is StatusCode.OK:
                    self.regions.release(found, done)
                else:
                    self._end_control(cookie, code, raw, 0, "release failed")

            self.network.control(run)

    def submit_connect(self, cookie: int, address: bytes) -> None:
        parsed = FakeAddress.unpack(address)

        def run() -> tuple[StatusCode, int, str]:
            code, peer = self.peer_table.reach(parsed, by_name=True)
            if code is StatusCode.STALE_KEY:
                return StatusCode.PEER_REJECTED, 0, "another incarnation lives at this address"
            if code is not StatusCode.OK or peer is None:
                return StatusCode.PEER_UNREACHABLE, 0, "nobody lives at this address"
            return StatusCode.OK, peer.id, ""

        self._control(cookie, run)

    def submit_disconnect(self, cookie: int, peer: int) -> None:
        with self.network.lock:
            found = self._open().peer_table.find(peer)

            def run() -> tuple[StatusCode, int, str]:
                self.peer_table.lose(found, PeerState.DISCONNECTED)
                return StatusCode.OK, found.id, ""

            self._control(cookie, run)

    def submit_close(self, cookie: int, cancel_unposted: bool) -> None:
        with self.network.lock:
            if self._closing is not None:
                raise refusal(StatusCode.CLOSED, "the engine is closing already")
            self._closing = cookie
            self.ops.drain_all(cancel_unposted)
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
