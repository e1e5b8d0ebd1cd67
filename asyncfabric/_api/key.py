"""RegionKey: the right to reach a region of somebody, as bytes; checked before any engine sees them.

Values, any thread; opening happens on the event loop's thread. A key is a capability (INV-3): whoever holds its bytes
may use it, until its owner revokes the generation or ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncfabric._api.address import MAX_ENGINE_BYTES
from asyncfabric._api.checks import access_name, checked_bytes
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.opened_key import OpenedKey, open_key
from asyncfabric._bridge.status import StatusCode
from asyncfabric.types import AccessMode

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

_FRAME = struct.Struct(">4sBBHQQQQ")  # magic, version, access, engine bytes, incarnation, region, generation, length
_MAGIC = b"AFrk"
_VERSION = 1


class RegionKey:
    """The right to write into or read from a region of a peer; made by `region.key()`, handed over as bytes.

    Hashable, comparable by value. The bytes are versioned and bounded; they name the fabric's incarnation, the region,
    its generation, its length and the rights.
    """

    __slots__ = ("_access", "_data", "_generation", "_incarnation", "_length", "_region", "opened")

    def __init__(
        self, incarnation: int, region: int, generation: int, length: int, access: int, engine_bytes: bytes
    ) -> None:
        """Not for users: use `region.key()` or `from_bytes`."""
        self._incarnation = incarnation
        self._region = region
        self._generation = generation
        self._length = length
        self._access = access
        self._data = engine_bytes
        self.opened: OpenedKey | None = None

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RegionKey:
        """Parse what `to_bytes` made; raises ValueError for other bytes, TypeError for no bytes."""
        raw = checked_bytes("a region key", data)
        if not _FRAME.size < len(raw) <= _FRAME.size + MAX_ENGINE_BYTES:
            most = _FRAME.size + MAX_ENGINE_BYTES
            raise ValueError(f"a region key has {_FRAME.size + 1}..{most} bytes, got {len(raw)}")
        magic, version, access, size, incarnation, region, generation, length = _FRAME.unpack_from(raw)
        if magic != _MAGIC:
            raise ValueError(f"not a region key: it begins with {raw[:4]!r} instead of {_MAGIC!r}")
        if version != _VERSION:
            raise ValueError(f"region key of version {version}, this program understands {_VERSION}")
        if size != len(raw) - _FRAME.size:
            raise ValueError(f"region key states {size} bytes and carries {len(raw) - _FRAME.size}")
        if not 1 <= access <= 3 or length == 0:
            raise ValueError(f"region key is damaged: access {access}, length {length}")
        return cls(incarnation, region, generation, length, access, raw[_FRAME.size :])

    def to_bytes(self) -> bytes:
        """Return the key as bytes."""
        head = (_MAGIC, _VERSION, self._access, len(self._data))
        return _FRAME.pack(*head, self._incarnation, self._region, self._generation, self._length) + self._data

    @property
    def length(self) -> int:
        """Bytes that the key reaches; offsets in calls are 0..length."""
        return self._length

    @property
    def access(self) -> AccessMode:
        """What the key permits: write, read or read-write."""
        mode: AccessMode = access_name(self._access)
        return mode

    @property
    def incarnation(self) -> int:
        """Incarnation of the fabric that owns the memory."""
        return self._incarnation

    @property
    def region_id(self) -> int:
        """Number of the region at its owner."""
        return self._region

    @property
    def generation(self) -> int:
        """Generation of the region that the key belongs to; `region.revoke()` begins a new one."""
        return self._generation

    def open_for(self, dispatcher: CompletionDispatcher) -> OpenedKey:
        """Return the key as this engine knows it; not for users.

        Raises:
            ValueError: the engine does not accept the bytes.
            StaleKeyError: the engine knows already that the key is dead.
        """
        opened = self.opened
        if opened is not None and opened.dispatcher is dispatcher:
            return opened
        try:
            opened = open_key(dispatcher, self._data)
        except EngineStatusError as error:
            if error.code != StatusCode.INVALID_ARGUMENT:
                raise faults.refused(error, faults.FailedCall(f"opening {self!r}")) from None
            raise ValueError(
                f"{self!r} is damaged, forged or of another version: its field engine_bytes "
                f"({len(self._data)} bytes) is none that an engine made; ask the owner of the memory for a new key"
            ) from None
        frame = (self._incarnation, self._region, self._generation, self._length, self._access)
        for field, stated, meant in zip(opened.info._fields, frame, opened.info, strict=False):
            if stated != meant:
                raise ValueError(
                    f"{self!r} is damaged or forged: its field {field} is {stated} in the frame and {meant} in the "
                    "engine bytes; ask the owner of the memory for a new key"
                )
        self.opened = opened
        return opened

    def __bytes__(self) -> bytes:
        return self.to_bytes()

    def __reduce__(self) -> tuple[Callable[[bytes], RegionKey], tuple[bytes]]:
        # A copy is the right alone: what an engine of this process knows of it stays behind.
        return RegionKey.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return (
            f"<RegionKey {self.access} {self._length} bytes, region {faults.short_id(self._region)}"
            f" generation {self._generation} of {self._incarnation:016x}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RegionKey):
            return NotImplemented
        return self._data == other._data and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self._data)
