"""Which coding pays: what both ends know, a sample that is coded for real, and the rate of the wire.

Coding, sending and decoding overlap, so an update takes as long as the slowest of the three. A coding is used when it
is faster than plain bytes by a margin; on a fast wire none is, and nothing but the sample was spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from time import perf_counter

import msgspec
import numpy as np

from asyncfabric.weights.coding.delta import apply_delta, encode_delta
from asyncfabric.weights.coding.exponent import decode_exponents, encode_exponents
from asyncfabric.weights.coding.streams import Bytes

GAIN = 0.95
"""A coding has costs that the sample does not see (memory, cores that others want), so it has to save 5 percent."""

SAMPLE_BYTES = 4 << 20


class Coding(Enum):
    """How weights travel. The values are what ends tell each other."""

    FULL = "full"
    DELTA = "delta"
    EXPONENT = "exponent"


KNOWN = tuple(one.value for one in Coding)
"""What this version of the package reads and writes, to be told to the other end."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a coding took for a sample.

    Attributes:
        coding: which.
        ratio: coded bytes for each byte of weights.
        encode_bytes_per_s, decode_bytes_per_s: bytes of weights that one core codes and decodes in a second.
    """

    coding: Coding
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def bytes_per_s(self, wire_bytes_per_s: float, encode_cores: float = 1, decode_cores: float = 1) -> float:
        """Return bytes of weights that arrive in a second: the slowest of coding, sending and decoding."""
        return min(
            self.encode_bytes_per_s * encode_cores,
            wire_bytes_per_s / self.ratio,
            self.decode_bytes_per_s * decode_cores,
        )


def common(*known: Iterable[str]) -> tuple[Coding, ...]:
    """Return the codings that all of these ends know; FULL is always among them, whatever else they said."""
    shared = set(KNOWN).intersection(*known) | {Coding.FULL.value}
    return tuple(one for one in Coding if one.value in shared)


def measure(coding: Coding, new: Bytes, item_bytes: int, old: Bytes | None = None) -> Costs | None:
    """Code a sample of the weights, decode it, and return what it took; None when it would not be shorter.

    Args:
        coding: DELTA or EXPONENT.
        new: the weights, uint8, one dimension. Of long ones a part from the middle is tried.
        item_bytes: of an element.
        old: the version that the receiver holds, for DELTA.

    Raises ValueError when FULL is asked for, or a delta without an old version.
    """
    if coding is Coding.FULL or (coding is Coding.DELTA and old is None):
        raise ValueError(f"cannot try {coding.value} {'without an old version' if coding is Coding.DELTA else ''}")
    part = _middle(new.size, item_bytes)
    sample = np.ascontiguousarray(new[part])
    held = np.ascontiguousarray(old[part]) if old is not None else np.zeros_like(sample)
    encode: Callable[[], bytes | None]
    decode: Callable[[Bytes, bytes, int], object]
    if coding is Coding.DELTA:
        encode, decode = (lambda: encode_delta(held, sample, item_bytes)), apply_delta
    else:
        encode, decode = (lambda: encode_exponents(sample, item_bytes)), decode_exponents
    began = perf_counter()
    message = encode()
    coded = perf_counter()
    if message is None:
        return None
    again = held.copy()
    copied = perf_counter()
    decode(again, message, item_bytes)
    decoded = perf_counter()
    return Costs(
        coding=coding,
        ratio=len(message) / sample.size,
        encode_bytes_per_s=sample.size / (coded - began),
        decode_bytes_per_s=sample.size / (decoded - copied),
    )


def choose(
    costs: Sequence[Costs | None], wire_bytes_per_s: float, encode_cores: float = 1, decode_cores: float = 1
) -> Coding:
    """Return the fastest way for these weights.

    Args:
        costs: of the codings that were tried; None for one that would not be shorter.
        wire_bytes_per_s: what plain bytes reach between these two ends.
        encode_cores: cores that the sender has to spare.
        decode_cores: cores that the receiver has to spare.

    Raises ValueError when the wire has no rate.
    """
    if wire_bytes_per_s <= 0:
        raise ValueError(f"wire_bytes_per_s must be above 0, got {wire_bytes_per_s}")
    best, rate = Coding.FULL, wire_bytes_per_s / GAIN
    for one in costs:
        if one is not None and (mine := one.bytes_per_s(wire_bytes_per_s, encode_cores, decode_cores)) > rate:
            best, rate = one.coding, mine
    return best


def _middle(length: int, item_bytes: int) -> slice:
    size = min(length, SAMPLE_BYTES) // item_bytes * item_bytes
    begin = (length - size) // 2 // item_bytes * item_bytes
    return slice(begin, begin + size)
