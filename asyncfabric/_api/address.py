"""FabricAddress: where a fabric is, as bytes and as text for command lines; and the frame that keys share with it.

Pure values, any thread. The frame adds a magic, a version and the incarnation to the engine's own bytes, so that people
and caches can distinguish addresses without an engine.
"""

from __future__ import annotations

import base64
import binascii
import struct

from asyncfabric._api.checks import checked_bytes

MAX_ENGINE_BYTES = 4096
"""Most bytes that an engine puts into an address or a key (kMaxAddressBytes, kMaxKeyBytes)."""

_FRAME = struct.Struct(">4sBBHQ")  # magic, version, reserved, engine bytes, incarnation
_MAGIC = b"AFad"
_VERSION = 1
_TEXT_HEAD = "af1-"


class FabricAddress:
    """Where to reach a fabric; made by `fabric.address`, handed to peers as bytes or as text.

    Hashable, comparable by value. `incarnation` is random for each opening of a fabric, so that a restarted process is
    never mistaken for its predecessor.
    """

    __slots__ = ("_data", "_incarnation")

    def __init__(self, incarnation: int, engine_bytes: bytes) -> None:
        """Not for users: use `fabric.address`, `from_bytes` or `parse`."""
        self._incarnation = incarnation
        self._data = engine_bytes

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> FabricAddress:
        """Parse what `to_bytes` made; raises ValueError for anything else."""
        raw = checked_bytes("a fabric address", data)
        if not _FRAME.size < len(raw) <= _FRAME.size + MAX_ENGINE_BYTES:
            most = _FRAME.size + MAX_ENGINE_BYTES
            raise ValueError(f"a fabric address has {_FRAME.size + 1}..{most} bytes, got {len(raw)}")
        magic, version, reserved, length, incarnation = _FRAME.unpack_from(raw)
        if magic != _MAGIC:
            raise ValueError(f"not a fabric address: it begins with {raw[:4]!r} instead of {_MAGIC!r}")
        if version != _VERSION or reserved != 0:
            raise ValueError(f"fabric address of version {version}, this program understands {_VERSION}")
        if length != len(raw) - _FRAME.size:
            raise ValueError(f"fabric address states {length} bytes and carries {len(raw) - _FRAME.size}")
        return cls(incarnation, raw[_FRAME.size :])

    @classmethod
    def parse(cls, text: str) -> FabricAddress:
        """Parse what `str(address)` made; raises ValueError for anything else."""
        if not isinstance(text, str):
            raise TypeError(f"parse() reads text, got {type(text).__name__}; from_bytes() reads bytes")
        if not text.startswith(_TEXT_HEAD):
            raise ValueError(f"a fabric address as text begins with {_TEXT_HEAD!r}, got {text[:16]!r}")
        body = text[len(_TEXT_HEAD) :]
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"fabric address text is damaged: {error}") from None
        return cls.from_bytes(raw)

    @property
    def incarnation(self) -> int:
        """Random number of one opening of the fabric."""
        return self._incarnation

    @property
    def engine_bytes(self) -> bytes:
        """The bytes that the engine made; only engines understand them."""
        return self._data

    def to_bytes(self) -> bytes:
        """Return the address as bytes."""
        return _FRAME.pack(_MAGIC, _VERSION, 0, len(self._data), self._incarnation) + self._data

    def __bytes__(self) -> bytes:
        return self.to_bytes()

    def __str__(self) -> str:
        return _TEXT_HEAD + base64.urlsafe_b64encode(self.to_bytes()).decode("ascii").rstrip("=")

    def __repr__(self) -> str:
        return f"<FabricAddress {self._incarnation:016x}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FabricAddress):
            return NotImplemented
        return self._incarnation == other._incarnation and self._data == other._data

    def __hash__(self) -> int:
        return hash((self._incarnation, self._data))
