"""Offers: what a process lets others reach, handed to whoever connects to its TCP port: no request, one answer.

The server's threads read nothing, so that no stranger keeps one waiting; each connection has a few seconds to take its
offer, and there are few at a time. An offer holds keys: they open nothing to those whom the fabric's own hello refuses.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from threading import BoundedSemaphore, Thread
from typing import TypeVar

import msgspec

from asyncfabric.errors import ClosedError, DeviceError, PeerError
from asyncfabric.unreadable import UNREADABLE

MAX_OFFER_BYTES = 64 << 20
_FRAME = struct.Struct(">4sI")  # magic with its version, bytes that follow
_MAGIC = b"AFo1"
_SEND_S = 5.0
_AT_A_TIME = 32
_Offer = TypeVar("_Offer")


def parse_place(place: str) -> tuple[str, int]:
    """Return host and port of `host:port`, which may begin with `tcp://`.

    Raises:
        ValueError: no host, or no port of 0..65535.
    """
    host, _, port = place.split("://", 1)[-1].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {place!r}")
    return host.strip("[]"), int(port)


def read_offer(data: bytes, kind: type[_Offer]) -> _Offer:
    """Return what `fetch_offer` fetched.

    Raises:
        ValueError: another program listens there, or another version of this one.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise ValueError(f"the offer of {len(data)} bytes is none that this program reads: {error}") from None


class OfferServer:
    """Answers every connection to a port with the offer of the moment; runs one thread, and one for each answer."""

    def __init__(self, host: str, port: int, offer: Callable[[], bytes]) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            DeviceError: the port is taken, or the host is none of this machine.
        """
        self._offer = offer
        self._slots = BoundedSemaphore(_AT_A_TIME)
        try:
            self._socket = socket.create_server((host, port), family=_family(host), backlog=128)
        except OSError as error:
            raise DeviceError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                remedy="choose a free port and an address of this machine",
                raw=error.errno or 0,
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = Thread(target=self._serve, name="offers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; returns when the thread that accepts has ended. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        except OSError:
            pass  # closed already
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                return  # closed
            if self._slots.acquire(blocking=False):
                Thread(target=self._answer, args=(connection,), name="offer", daemon=True).start()
            else:
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_SEND_S)
                offer = self._offer()
                connection.sendall(_FRAME.pack(_MAGIC, len(offer)) + offer)
        except (OSError, ClosedError):
            pass  # whoever asked went away, or this process is ending: nothing of ours is broken
        finally:
            self._slots.release()


def fetch_offer(place: str, deadline: float) -> bytes:
    """Return what the server at `host:port` offers now.

    Args:
        place: `host:port`.
        deadline: seconds from now.

    Raises:
        ValueError: not a place.
        PeerError: nobody answers there within the deadline, or something else than an OfferServer.
    """
    host, port = parse_place(place)
    try:
        with socket.create_connection((host, port), deadline) as connection:
            connection.settimeout(deadline)
            magic, length = _FRAME.unpack(_exactly(connection, _FRAME.size))
            if magic != _MAGIC or length > MAX_OFFER_BYTES:
                raise PeerError(
                    f"{place} answers with {magic!r}, which is no offer of asyncfabric",
                    remedy="check the port, and that both ends use asyncfabric of the same version",
                )
            return _exactly(connection, length)
    except (OSError, EOFError) as error:
        raise PeerError(
            f"no offer came from {place} within {deadline:g} s: {error}",
            remedy="check that the process runs, and that its port can be reached from here",
        ) from error


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(min(1 << 20, length - len(parts)))
        if not part:
            raise EOFError(f"the connection ended after {len(parts)} of {length} bytes")
        parts += part
    return bytes(parts)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
