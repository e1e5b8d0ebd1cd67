"""Messages about note slots: an agent asks for them, the target grants them, a transfer that failed withdraws its own.

Pure functions, any thread. A slot has a number, which the target never gives twice, and the imm of its counter.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MOST_NAMED = 64
"""Slots that one message names."""

_HEAD = struct.Struct(">2sBBB")  # magic, version, purpose, slots
_SLOT = struct.Struct(">QQ")  # number, value
_MAGIC, _VERSION = b"AS", 1


class Purpose(IntEnum):
    """What a message is for."""

    ASK = 1
    GRANT = 2
    WITHDRAW = 3


class SlotEntry(NamedTuple):
    """A slot in a message: its number, and a value.

    Attributes:
        number: of the slot.
        value: in a grant the imm of its counter, in a withdrawal the count up to which its transfers have ended well.
    """

    number: int
    value: int


class SlotMessage(NamedTuple):
    """One message."""

    purpose: Purpose
    slots: tuple[SlotEntry, ...]


def pack(purpose: Purpose, slots: list[SlotEntry]) -> bytes:
    """Return a message as bytes; of at most MOST_NAMED slots."""
    return _HEAD.pack(_MAGIC, _VERSION, purpose, len(slots)) + b"".join(_SLOT.pack(*slot) for slot in slots)


def read(payload: bytes) -> SlotMessage | None:
    """Return what a message carries, None for one that no agent has made."""
    if len(payload) < _HEAD.size:
        return None
    magic, version, purpose, count = _HEAD.unpack_from(payload)
    if magic != _MAGIC or version != _VERSION or purpose not in (1, 2, 3) or count > MOST_NAMED:
        return None
    if len(payload) != _HEAD.size + count * _SLOT.size:
        return None
    slots = tuple(SlotEntry(*one) for one in _SLOT.iter_unpack(payload[_HEAD.size :]))
    return SlotMessage(Purpose(purpose), slots)
