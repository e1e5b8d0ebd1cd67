"""Checks of arguments at the call: each states the value and the bound in its text.

Pure functions. The hot paths test the common case themselves and come here only when something looks unusual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import index
from typing import Any, TypeVar

from asyncfabric.types import ACCESS_BITS, MAX_IMM

Item = TypeVar("Item")

MAX_BYTES = 1 << 46
"""Largest region; beyond it the engine refuses, and numbers would leave 64 bits."""


def checked_index(name: str, value: object, low: int = 0, high: int | None = None) -> int:
    """Return an integer within low..high; numpy integers are fine, bool and float are not.

    Raises:
        TypeError: not an integer.
        ValueError: outside the bounds.
    """
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None
    if number < low or (high is not None and number > high):
        bound = f">= {low}" if high is None or (high == MAX_BYTES and number < low) else f"in {low}..{high}"
        raise ValueError(f"{name} must be {bound}, got {number}")
    return number


def checked_bytes(name: str, data: object) -> bytes:
    """Return what came over the wire as bytes; raises TypeError for anything else, also for text and for numbers."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise TypeError(f"{name} is parsed from bytes, got {type(data).__name__}")


def checked_iterable(name: str, value: Iterable[Item], of: str) -> Iterator[Item]:
    """Return an iterator over an argument; raises TypeError that names it for what cannot be iterated over."""
    try:
        return iter(value)
    except TypeError:
        raise TypeError(f"{name} must be a list of {of}, got {type(value).__name__} {value!r}") from None


def checked_imm(imm: object) -> int:
    """Return an immediate value as the engine wants it: -1 for None."""
    return -1 if imm is None else checked_index("imm", imm, 0, MAX_IMM)


def checked_access(access: object) -> int:
    """Return the access bits of an access mode."""
    bits = ACCESS_BITS.get(access) if isinstance(access, str) else None
    if bits is None:
        raise ValueError(f"access must be one of {sorted(ACCESS_BITS)}, got {access!r}")
    return bits


def access_name(bits: int) -> Any:
    """Return the access mode of access bits."""
    for name, number in ACCESS_BITS.items():
        if number == bits:
            return name
    raise ValueError(f"unknown access bits {bits}")


def checked_slice(name: str, part: object, length: int) -> tuple[int, int]:
    """Return (offset, length) of `[a:b]` within `length` bytes; nothing is clamped, since that would lose bytes."""
    if not isinstance(part, slice):
        raise TypeError(f"{name} is sliced as [a:b] in bytes, got {type(part).__name__} {part!r}")
    if part.step is not None and part.step != 1:
        raise ValueError(f"{name}[a:b] takes no step, got {part.step!r}")
    start = 0 if part.start is None else checked_index("slice start", part.start)
    stop = length if part.stop is None else checked_index("slice end", part.stop)
    if not start <= stop <= length:
        raise ValueError(f"slice [{start}:{stop}] leaves {name} of {length} bytes, or ends before it starts")
    return start, stop - start
