"""Bytes that fakes hand to each other: addresses and region keys, versioned, bounded and checked.

Runs on any thread; pure functions. A checksum refuses every damaged byte, a random secret per generation keeps a
forged key from opening a region. The layout is private to the fake: a native engine refuses these bytes, and the
other way round.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass, field

from asyncfabric._bridge.status import StatusCode, refusal

_VERSION = 1
_HEAD = struct.Struct(">4sHH")
_CHECKSUM = struct.Struct(">I")
_ADDRESS = struct.Struct(">QQ")
_KEY = struct.Struct(">QQQQQQQII")


@dataclass(frozen=True, slots=True)
class FakeAddress:
    """Where an engine is (`place`) and which run of it (`incarnation`)."""

    place: int
    incarnation: int

    def pack(self) -> bytes:
        """Return the bytes."""
        return _seal(b"AFfa", _ADDRESS.pack(*astuple(self)))

    @classmethod
    def unpack(cls, data: bytes) -> FakeAddress:
        """Parse hostile bytes; refuses anything that `pack` did not make."""
        return cls(*_ADDRESS.unpack(_unseal(b"AFfa", data, _ADDRESS.size, "address")))


@dataclass(frozen=True, slots=True)
class FakeKey:
    """A capability: which bytes (`offset`, `length`) of which region, with which rights."""

    place: int
    incarnation: int
    region: int
    generation: int
    secret: int
    offset: int
    length: int
    access: int
    rails: int
    opened: int = field(default=0, compare=False)  # its number among the keys that an engine opened

    @property
    def owner(self) -> FakeAddress:
        """Where the engine is that owns the memory."""
        return FakeAddress(self.place, self.incarnation)

    def pack(self) -> bytes:
        """Return the bytes."""
        return _seal(b"AFfk", _KEY.pack(*astuple(self)[:-1]))

    @classmethod
    def unpack(cls, data: bytes) -> FakeKey:
        """Parse hostile bytes; refuses anything that `pack` did not make."""
        return cls(*_KEY.unpack(_unseal(b"AFfk", data, _KEY.size, "key")))


def _seal(magic: bytes, body: bytes) -> bytes:
    head = _HEAD.pack(magic, _VERSION, _HEAD.size + len(body) + _CHECKSUM.size)
    return head + body + _CHECKSUM.pack(zlib.crc32(head + body))


def _unseal(magic: bytes, data: bytes, body_bytes: int, what: str) -> bytes:
    total = _HEAD.size + body_bytes + _CHECKSUM.size
    data = bytes(data)
    if len(data) != total:
        raise refusal(StatusCode.INVALID_ARGUMENT, f"{what} of {len(data)} bytes, expected {total}")
    if data[: _HEAD.size] != _HEAD.pack(magic, _VERSION, total):
        raise refusal(StatusCode.INVALID_ARGUMENT, f"{what} does not begin with {magic!r} of version {_VERSION}")
    if zlib.crc32(data[: -_CHECKSUM.size]) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        raise refusal(StatusCode.INVALID_ARGUMENT, f"{what} is damaged (checksum)")
    return data[_HEAD.size : -_CHECKSUM.size]
