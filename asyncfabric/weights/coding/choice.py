"""Choice: whether a coding is used for a receiver, from measured rates. Values and decisions; moves no bytes.

A sender measures two things while it works: how fast plain bytes reached each receiver, and, on a sample of the weights
of two versions, how fast they are coded and how short they get. `choose` decides; until both are known, and on a wire
that is faster than coding, bytes go plain. Busy moments must not make a fast wire look slow: the best of the last plain
versions counts, and now and then one goes plain to look again. A coding that turned out slower than that twice in a row
is not used again before the next sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Literal

import msgspec
import numpy as np

from asyncfabric.weights.coding.codings import Bytes, apply_delta, decode_exponents, encode_delta, encode_exponents

GAIN = 0.95
"""A coding has costs that the sample does not see (memory, cores that others want), so it has to save 5 percent."""

SAMPLE_BYTES = 4 << 20


class Coding(Enum):
    """How weights travel. The values are what ends send each other."""

    FULL = "full"
    DELTA = "delta"
    EXPONENT = "exponent"


KNOWN = tuple(one.value for one in Coding)
"""What this version of the package reads and writes, to be sent to the other end."""


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
    """Return the codings that all of these ends know; FULL is always among them, whatever else they sent."""
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


Rule = Literal["auto", "always"]
"""When a coding is used: where it was measured to be faster, or wherever both ends can."""

MEASURE_EVERY = 16
"""Versions from one sample to the next: a sample takes some tens of milliseconds of one core."""

TRIES = 3
"""A sample is coded so often, and the fastest try counts: a core that others took for a moment is no slow coding."""

MOST_SLOWER = 2
"""Once may be chance: a busy moment of either end."""

PLAIN_FIRST, PLAIN_KEPT = 3, 8
"""Plain versions before a coding is used, and those whose best rate counts. The first one touches memory first."""

LOOK_EVERY, FAR_BEHIND = 64, 4.0
"""Coded versions after which one goes plain, unless plain bytes were so much slower that it was no busy moment."""


@dataclass(frozen=True, slots=True)
class CodingOffer:
    """What is known of a receiver when its memory is open.

    Attributes:
        codings: that both ends know.
        has_base: it holds what this sender has kept, so that a delta can be made.
        share: bytes for this receiver, of all bytes that would be coded.
        senders: that code for it: they share its cores.
    """

    codings: frozenset[Coding]
    has_base: bool
    share: float
    senders: int


class CostRule:
    """What one sender has measured.

    Attributes:
        rule: see Rule.
    """

    def __init__(self, rule: Rule = "auto") -> None:
        """Know nothing yet."""
        self.rule: Rule = rule
        self._costs: dict[Coding, Costs | None] = {}
        self._plain: dict[str, deque[float]] = {}
        self._unseen: dict[str, int] = {}
        self._slower: dict[tuple[str, Coding], int] = {}
        self._measured_at = 0
        self._versions = 0

    def wants_sample(self, ahead: int = 0) -> bool:
        """Whether the codings are to be measured again, now or some versions ahead."""
        age = self._versions + ahead - self._measured_at
        return self.rule == "auto" and (not self._costs or age >= MEASURE_EVERY)

    def measured(self, costs: dict[Coding, Costs | None]) -> None:
        """Take what the codings took for a sample; None for one that did not make it shorter."""
        self._costs = costs
        self._measured_at = self._versions
        self._slower.clear()

    def sent(self, rates: Iterable[tuple[str, Coding, float]]) -> None:
        """Take how a version went: (receiver, its coding, bytes of weights per second)."""
        self._versions += 1
        for receiver, coding, bytes_per_s in rates:
            if coding is Coding.FULL:
                self._plain.setdefault(receiver, deque(maxlen=PLAIN_KEPT)).append(bytes_per_s)
                self._unseen[receiver] = 0
                continue
            plain = max(self._plain.get(receiver, (0.0,)))
            slower = self._slower.get((receiver, coding), 0)
            self._slower[receiver, coding] = slower + 1 if bytes_per_s < plain else 0
            self._unseen[receiver] = self._unseen.get(receiver, 0) + 1 if bytes_per_s < FAR_BEHIND * plain else 0

    def choose(self, receiver: str, offer: CodingOffer) -> tuple[Coding, str]:
        """Return the coding for a receiver, and why; DELTA also where it would pay if there were a base.

        The caller sends something else then, and keeps what it sends as a base for the next version.
        """
        able = [one for one in (Coding.DELTA, Coding.EXPONENT) if one in offer.codings]
        if self.rule == "always":
            return (able[0], "it is always used") if able else (Coding.FULL, "the ends have no coding in common")
        rates = self._plain.get(receiver, ())
        if len(rates) < PLAIN_FIRST or not self._costs:
            return Coding.FULL, "not measured yet"
        if self._unseen[receiver] >= LOOK_EVERY:
            return Coding.FULL, "plain bytes are measured again"
        rate = max(rates)
        fit = [one for one in able if self._slower.get((receiver, one), 0) < MOST_SLOWER]
        costs = [self._costs.get(one) for one in fit]
        best = choose(costs, rate, encode_cores=offer.share, decode_cores=1 / offer.senders)
        faster = "plain bytes are" if best is Coding.FULL else "it is"
        return best, f"{faster} faster on a wire on which they reach {rate / 1e9:.3g} GB/s"

    def settle(self, receiver: str, offer: CodingOffer) -> tuple[Coding, str]:
        """Return what this version is sent in: the choice, or the best without a base when there is none."""
        best, why = self.choose(receiver, offer)
        if best is not Coding.DELTA or offer.has_base:
            return best, why
        without = CodingOffer(offer.codings - {Coding.DELTA}, False, offer.share, offer.senders)
        best, _ = self.choose(receiver, without)
        return best, "it does not hold the version that is kept here"


def fastest_of(coding: Coding, new: Bytes, item_bytes: int, old: Bytes | None) -> Costs | None:
    """Return the best rates of several tries of a sample; None when the coding does not make it shorter. Blocking."""
    good = [one for _ in range(TRIES) if (one := measure(coding, new, item_bytes, old)) is not None]
    if not good:
        return None
    return msgspec.structs.replace(
        good[0],
        encode_bytes_per_s=max(one.encode_bytes_per_s for one in good),
        decode_bytes_per_s=max(one.decode_bytes_per_s for one in good),
    )


def known_codings(names: Iterable[str]) -> frozenset[Coding]:
    """Return codings by name, without FULL; raises ValueError for names that are not known."""
    for name in names:
        if name not in KNOWN:
            raise ValueError(f"{name!r} is not a coding of weights, known are {', '.join(KNOWN[1:])}")
    return frozenset(one for one in Coding if one.value in set(names) and one is not Coding.FULL)


SAMPLE_BOXES = 4
