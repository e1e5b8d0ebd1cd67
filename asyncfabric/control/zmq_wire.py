"""ROUTER and DEALER sockets on the event loop: the wire of `zmq_link`. The only file that imports zmq.

On the event loop's thread; libzmq has one I/O thread of its own per link. A socket's fd shows edges, not levels: it is
read until EAGAIN, and after each send, which may swallow an edge, the socket is asked again (ZMQ_EVENTS). The fd of a
socket also becomes readable when a full pipe has room again, so frames that wait for room are tried then; who asks the
socket may swallow that edge too, so the pump tries them in any case now and then.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from socket import socketpair
from typing import Any

import anyio
import zmq as _zmq
from anyio.abc import TaskGroup
from zmq.utils import z85

from asyncfabric.control import zap
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.events import Path
from asyncfabric.control.keys import LinkKeys
from asyncfabric.control.link_values import LinkConfig
from asyncfabric.control.protocol_errors import RefusedError
from asyncfabric.control.pump import Pump
from asyncfabric.control.switchboard import Switchboard
from asyncfabric.errors import DeviceError, PeerError

log: logging.Logger = logging.getLogger("asyncfabric.control")
zmq: Any = _zmq  # its stubs name nothing that they gather by star
MAX_PARTS = 8  # parts of one message that are kept; one more than any good message has would do
MAX_WAITING = 4096  # control frames that wait for room on a path before its peer counts as stuck
LINGER_MS = 100  # how long last messages may take to leave
END_S = 5.0  # and ZeroMQ to end then
_MONITORED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NO_CURVE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_NOT_TAKEN = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_DIAL_FAULTS = {
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake broke: does the listener have this key?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: one side uses CURVE, the other does not",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the listener does not trust our key: asyncfabric keys trust, over there",
}


class _Tap:
    """One socket, non-blocking, with the pump that serves it."""

    def __init__(self, socket: Any, deliver: Callable[[list[Any]], None], flush: Callable[[], bool]) -> None:
        self.socket = socket
        self._deliver = deliver
        self.pump = Pump(socket.getsockopt(zmq.FD), self._receive, flush, lambda: socket.close(LINGER_MS))

    def _receive(self) -> bool:
        """Hand over one message; False when there is none."""
        try:
            parts = [self.socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return False
        while parts[-1].more:  # the rest of a message is there when its first part is
            part = self.socket.recv(zmq.NOBLOCK, copy=False)
            parts = [*parts, part] if len(parts) < MAX_PARTS else [*parts[:-1], part]
        self._deliver(parts)
        return True

    def send(self, parts: list[bytes]) -> bool:
        """Send, or return False when there is no room now."""
        if self.pump.closed:
            return True
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            if self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self.pump.wake()
        return True


class ZmqWire:
    """The sockets of one link: a ROUTER that is bound, a DEALER with a monitor for each path that was dialed."""

    def __init__(self, config: LinkConfig, keys: LinkKeys | None, insecure: bool) -> None:
        if keys is not None and public_of(keys.secret) != keys.public:
            raise ValueError("the public key is not the one of the secret key: no peer would shake hands with both")
        self.context: Any = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 16384)
        self.switchboard: Switchboard
        self._config = config
        self._keys = keys
        self._insecure = insecure
        self._tasks: TaskGroup
        self._taps: dict[int, tuple[_Tap, _Tap]] = {}
        self._peer_keys: dict[int, str] = {}
        self._hints: dict[int, str] = {}
        self._waiting: dict[Path, deque[bytes]] = {}
        self._unreachable: list[bytes] = []
        self._fixed: list[_Tap] = []
        self._router: _Tap
        self._zap: _Tap | None = None
        self._door: _Tap | None = None

    def bind(self, endpoint: str, tasks: TaskGroup) -> str:
        """Bind the ROUTER, with its handler of authentication; return the endpoint that was got.

        Raises:
            DeviceError: it cannot be bound.
        """
        self._tasks = tasks
        router = self._socket(zmq.ROUTER, endpoint)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or broken path is an error, not a silent drop
        if endpoint.startswith("tcp://") and self._keys is not None:
            doorkeeper = self.context.socket(zmq.REP)
            doorkeeper.bind(zap.ENDPOINT)
            self._zap = _Tap(doorkeeper, self._judge, _nothing)
            # Peers with a key that is not trusted are reported by the doorkeeper, those without any by the monitor.
            self._door = _Tap(router.get_monitor_socket(_NO_CURVE), self._turned_away, _nothing)
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
            router.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(self._keys.secret))
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            self.context.destroy(0)
            raise DeviceError(
                f"cannot listen on {endpoint}: {error}",
                remedy="is the port taken, is the address one of this machine?",
                raw=error.errno or 0,
            ) from None
        self._router = _Tap(router, self._accepted, self._flush_router)
        self._fixed = [tap for tap in (self._zap, self._door, self._router) if tap is not None]
        for tap in self._fixed:
            self._tasks.start_soon(tap.pump.run)
        return str(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))

    def dial(self, path: int, address: LinkAddress) -> None:
        """Open a DEALER towards an address."""
        dealer = self._socket(zmq.DEALER, address.endpoint)
        monitor = None
        try:
            self._secure(dealer, address)
            monitor = dealer.get_monitor_socket(_MONITORED)
            dealer.connect(address.endpoint)
        except (zmq.ZMQError, PeerError) as error:
            dealer.disable_monitor()
            if monitor is not None:  # the traceback of what is raised holds it, so that no collector closes it
                monitor.close(0)
            dealer.close(0)
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"cannot dial {address}: {error}", raw=error.errno or 0) from None
        taps = (
            _Tap(dealer, lambda parts: self._answered(path, parts), lambda: self._flush_path(path)),
            _Tap(monitor, lambda parts: self._noticed(path, parts), _nothing),
        )
        self._taps[path] = taps
        self._peer_keys[path] = address.key
        for tap in taps:
            self._tasks.start_soon(tap.pump.run)

    def _secure(self, dealer: Any, address: LinkAddress) -> None:
        if not address.is_tcp:
            return
        if not address.key:
            if not self._insecure:
                raise _distrusted(f"{address} is plain TCP", "open the link with insecure=True to take that risk")
            return
        if self._keys is None:
            raise _distrusted(f"{address} uses CURVE, and this link has no keys", "asyncfabric keys new")
        if address.key not in self._keys.trusted:
            raise _distrusted(f"the key of {address} is not trusted here", f"asyncfabric keys trust {address.key}")
        dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(address.key))
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._keys.public))
        dealer.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(self._keys.secret))

    def _socket(self, kind: int, endpoint: str) -> Any:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._config.high_water_frames)
        socket.setsockopt(zmq.RCVHWM, self._config.high_water_frames)
        # Frames a little too large reach us and are counted; larger ones end their connection inside libzmq.
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * self._config.max_frame_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(self._config.connect_deadline_s * 1000))
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        return socket

    # ---- what comes

    def _accepted(self, parts: list[Any]) -> None:
        path = bytes(parts[0].bytes)
        if len(parts) != 2:
            self.switchboard.refused("parts", f"{len(parts) - 1} parts" if len(parts) < MAX_PARTS else "many parts")
            return
        key = ""
        if self._zap is not None:
            try:
                key = str(parts[1].get("User-Id"))
            except zmq.ZMQError:
                self.switchboard.refused("unauthenticated", "a frame without a key")
                return
        self.switchboard.received(path, parts[1].bytes, key)

    def _answered(self, path: int, parts: list[Any]) -> None:
        if len(parts) != 1:
            self.switchboard.refused("parts", f"{len(parts)} parts")
            return
        self.switchboard.received(path, parts[0].bytes, self._peer_keys.get(path, ""))

    def _noticed(self, path: int, parts: list[Any]) -> None:
        event, _ = zap.monitor_event([part.bytes for part in parts])
        if event == zmq.EVENT_CONNECT_RETRIED:
            self._hints[path] = "nobody listens there"
        elif event in _DIAL_FAULTS:
            if path in self._taps:
                self._taps[path][0].pump.drain()  # what came before the break, a goodbye for example, is first
            self.switchboard.path_lost(path, _DIAL_FAULTS[event], "unauthenticated" if event in _NOT_TAKEN else "")

    def _judge(self, parts: list[Any]) -> None:
        assert self._zap is not None and self._keys is not None
        verdict = zap.judge([part.bytes for part in parts], self._keys.trusted)
        if verdict.refused:
            self.switchboard.refused("unauthenticated", verdict.refused)
        self._zap.send(verdict.answer)

    def _turned_away(self, parts: list[Any]) -> None:
        self.switchboard.refused("unauthenticated", "a connection without CURVE, or for another key than ours")

    # ---- what leaves

    def emit(self, path: Path, frame: bytes) -> None:
        """Send a frame, or keep it until there is room."""
        waiting = self._waiting.get(path)
        if waiting is None and self._try(path, frame):
            return
        if waiting is None:
            waiting = self._waiting[path] = deque()
            tap = self._taps[path][0] if isinstance(path, int) else self._router
            tap.pump.wake()  # it tries again until nothing waits
        waiting.append(frame)
        if len(waiting) > MAX_WAITING:
            del self._waiting[path]
            self.switchboard.path_lost(path, f"it does not read: {MAX_WAITING} control frames wait")

    def has_room(self, path: Path) -> bool:
        """Return whether nothing waits for room on the path."""
        return path not in self._waiting

    def hint(self, path: int) -> str:
        """Return what is known about a path that did not connect."""
        return self._hints.pop(path, "")

    def drain(self) -> None:
        """Hand over what has come, and send what waits for room."""
        for tap in [self._router, *(taps[0] for taps in self._taps.values())]:
            tap.pump.drain()

    def close_path(self, path: Path) -> None:
        """Close a path. ZeroMQ closes the connection of a ROUTER's path when the other side does."""
        self._flush_path(path)
        self._waiting.pop(path, None)
        if isinstance(path, int) and path in self._taps:
            self._peer_keys.pop(path)
            dealer, monitor = self._taps.pop(path)
            dealer.socket.disable_monitor()
            monitor.pump.close()
            dealer.pump.close()

    def close(self) -> None:
        """Close all paths; the pumps release the sockets."""
        for path in list(self._taps):
            self.close_path(path)
        if self._fixed and self._door is not None:
            self._router.socket.disable_monitor()
        for tap in self._fixed:
            tap.pump.close()

    async def aclose(self) -> None:
        """End ZeroMQ once the pumps have ended; last messages have LINGER_MS to leave.

        What does not end within END_S is left behind with its thread, and that is logged.

        Cancellation: shielded by the caller.
        """
        ours, theirs = socketpair()

        def end() -> None:
            with theirs:  # closed, it wakes us
                self.context.term()

        # It blocks, so not on the event loop. A daemon: a thread of anyio that is left behind keeps asyncio's process.
        threading.Thread(target=end, name="asyncfabric-zmq-end", daemon=True).start()
        with ours, anyio.move_on_after(END_S) as patience:
            await anyio.wait_readable(ours)
        if patience.cancelled_caught:
            log.warning("ZeroMQ did not end within %g s; its sockets are left behind", END_S)

    def _try(self, path: Path, frame: bytes) -> bool:
        if isinstance(path, int):
            taps = self._taps.get(path)
            return taps is None or taps[0].send([frame])
        try:
            return self._router.send([path, frame])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._unreachable.append(path)
            self._router.pump.wake()
            return True

    def _flush_path(self, path: Path) -> bool:
        """Send what waits for room on a path; return whether something still waits."""
        waiting = self._waiting.get(path)
        while waiting:
            if not self._try(path, waiting[0]):
                return True
            waiting.popleft()
        if waiting is not None:
            del self._waiting[path]
            self.switchboard.writable(path)
        return path in self._waiting

    def _flush_router(self) -> bool:
        full = [self._flush_path(path) for path in list(self._waiting) if isinstance(path, bytes)]
        while self._unreachable:
            self.switchboard.path_lost(self._unreachable.pop(), _DIAL_FAULTS[zmq.EVENT_DISCONNECTED])
        return any(full)


def _distrusted(message: str, remedy: str) -> RefusedError:
    return RefusedError(message, code="unauthenticated", remedy=remedy)


def _nothing() -> bool:
    """Nothing waits for room."""
    return False


def public_of(secret: str) -> str:
    """Return the public key of a secret key, both 64 hex digits."""
    public: bytes = z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret))))
    return public.hex()


def make_keys() -> tuple[str, str]:
    """Return a new key pair: public and secret, 64 hex digits each."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()
