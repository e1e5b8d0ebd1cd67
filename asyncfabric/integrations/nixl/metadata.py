"""The metadata of an agent: opaque bytes for callers, which name it, where it is and the keys of its memory.

Pure functions, any thread. Versioned and bounded; whatever is wrong with the bytes raises nixlMismatchError.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from asyncfabric import FabricAddress, RegionKey
from asyncfabric.integrations.nixl.errors import nixlMismatchError
from asyncfabric.integrations.nixl.kinds import DRAM, VRAM, nixl_mem_t
from asyncfabric.integrations.nixl.ranges import Place, RangeTable

KeyTable = RangeTable[RegionKey]

_MAGIC, _VERSION = b"AFnx", 1
_HEAD = struct.Struct(">4sBBHHQI")  # magic, version, whole, name bytes, address bytes, serial, entries
_ENTRY = struct.Struct(">BIQQH")  # memory, device, start, length, key bytes


class Metadata(NamedTuple):
    """What an agent hands out.

    Attributes:
        name: of the agent.
        address: of its fabric; None in a part that is for those who know the agent already.
        serial: grows with each change of its registrations.
        whole: all registrations are in it; otherwise some of them.
        keys: the bytes of a key for each registered place.
    """

    name: str
    address: FabricAddress | None
    serial: int
    whole: bool
    keys: dict[Place, bytes]


def entry(place: Place, key: RegionKey) -> bytes:
    """Return one registration as bytes; they are kept, since metadata is asked for often."""
    raw = key.to_bytes()
    return _ENTRY.pack(place.memory, place.device, place.start, place.length, len(raw)) + raw


def pack(name: str, address: FabricAddress | None, serial: int, whole: bool, entries: list[bytes]) -> bytes:
    """Return metadata as bytes."""
    title, where = name.encode(), address.to_bytes() if address is not None else b""
    head = _HEAD.pack(_MAGIC, _VERSION, whole, len(title), len(where), serial, len(entries))
    return b"".join((head, title, where, *entries))


def unpack(data: bytes | str) -> Metadata:
    """Read what `pack` made.

    Raises:
        nixlMismatchError: other bytes; the text names what is wrong with them.
    """
    try:
        raw = data.encode() if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError:
        raise nixlMismatchError("metadata as text holds half a surrogate pair: no agent makes it") from None
    if len(raw) < _HEAD.size or raw[:4] != _MAGIC:
        raise nixlMismatchError(
            f"{len(raw)} bytes that begin with {raw[:8]!r} are no metadata of an agent of asyncfabric; both sides have "
            "to run its NIXL face"
        )
    _, version, whole, title_bytes, where_bytes, serial, count = _HEAD.unpack_from(raw)
    if version != _VERSION:
        raise nixlMismatchError(f"metadata of version {version}, this program understands {_VERSION}")
    cursor = _HEAD.size + title_bytes + where_bytes
    keys: dict[Place, bytes] = {}
    try:
        name = raw[_HEAD.size : _HEAD.size + title_bytes].decode()
        where = raw[_HEAD.size + title_bytes : cursor]
        address = FabricAddress.from_bytes(where) if where else None
        for _ in range(count):
            memory, device, start, length, size = _ENTRY.unpack_from(raw, cursor)
            begin, cursor = cursor + _ENTRY.size, cursor + _ENTRY.size + size
            if memory not in (DRAM, VRAM) or start + length >= 1 << 63 or cursor > len(raw):
                raise ValueError(f"registration at byte {begin} is out of bounds")
            keys[Place(nixl_mem_t(memory), device, start, length)] = raw[begin:cursor]
    except (ValueError, struct.error) as error:
        raise nixlMismatchError(f"metadata of {len(raw)} bytes is damaged: {error}") from None
    if cursor != len(raw):
        raise nixlMismatchError(f"metadata of {len(raw)} bytes is damaged: it ends at byte {cursor}")
    return Metadata(name, address, serial, bool(whole), keys)
