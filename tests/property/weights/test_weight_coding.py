"""Codings of weights: exact for any bit patterns, never longer than plain bytes, safe against damaged messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.weights.coding.choice import KNOWN, Coding, Costs, choose, common, measure
from asyncfabric.weights.coding.codings import (
    apply_delta,
    decode_exponents,
    encode_delta,
    encode_exponents,
    packed,
    unpacked,
)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ITEMS = st.sampled_from([1, 2, 4])


def weights(seed: int, elements: int, item_bytes: int) -> Bytes:
    """Return normal numbers as bfloat16 or float32; any bytes for elements of one byte."""
    random = np.random.default_rng(seed)
    if item_bytes == 1:
        return random.integers(0, 256, elements, dtype=np.uint8)
    wide = (random.standard_normal(elements) * 0.02).astype("<f4").view("<u4")
    return (wide if item_bytes == 4 else (wide >> 16).astype("<u2")).view(np.uint8)


def stepped(old: Bytes, item_bytes: int, where: np.ndarray[Any, Any], steps: np.ndarray[Any, Any]) -> Bytes:
    """Return the old version with steps added to some elements, modulo their width."""
    new = old.copy()
    held = new.view(f"<u{item_bytes}")
    np.add.at(held, where, steps.astype(f"<i{item_bytes}").view(f"<u{item_bytes}"))
    return new


@given(st.integers(0, 1000), st.integers(0, 3000), ITEMS, st.data())
def test_a_delta_is_exact(seed: int, elements: int, item_bytes: int, data: st.DataObject) -> None:
    old = weights(seed, elements, item_bytes)
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    changed = data.draw(st.integers(0, elements)) // data.draw(st.sampled_from([1, 10, 1000]))
    where = random.choice(elements, changed, replace=False) if elements else np.zeros(0, np.int64)
    largest = data.draw(st.sampled_from([1, 3, 127]))
    new = stepped(old, item_bytes, where, random.integers(-largest, largest + 1, changed))
    message = encode_delta(old, new, item_bytes)
    if message is None:
        return
    assert len(message) < new.size
    held = old.copy()
    kind = f"<u{item_bytes}"
    assert apply_delta(held, message, item_bytes) == int((old.view(kind) != new.view(kind)).sum())
    assert np.array_equal(held, new)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_of_any_length(gap: int) -> None:
    old = np.zeros(2 * (gap + 700), np.uint8)
    new = old.copy()
    new.view("<u2")[[gap, gap + 1, 2 * gap + 2 if gap < 600 else -1]] = [0xFFFF, 0x8000, 1]
    message = encode_delta(old, new, 2)
    assert message is not None
    assert apply_delta(old, message, 2) == np.count_nonzero(new.view("<u2"))
    assert np.array_equal(old, new)


def test_a_small_step_costs_little_and_a_large_one_is_not_sent_as_a_delta() -> None:
    old = weights(1, 1 << 18, 2)
    where = np.random.default_rng(2).choice(1 << 18, (1 << 18) // 64, replace=False)
    steps = np.random.default_rng(3).choice([-1, 1], where.size)
    message = encode_delta(old, stepped(old, 2, where, steps), 2)
    assert message is not None
    assert len(message) < where.size * 1.5 + 200  # about one byte for the gap, a bit for the direction
    assert encode_delta(old, weights(9, 1 << 18, 2), 2) is None


@given(st.integers(0, 1000), st.integers(0, 3000), ITEMS)
def test_exponents_are_exact(seed: int, elements: int, item_bytes: int) -> None:
    new = weights(seed, elements, item_bytes)
    message = encode_exponents(new, item_bytes)
    if elements >= 2000 and item_bytes > 1:
        assert message is not None
        assert len(message) < new.size * (0.76 if item_bytes == 2 else 0.9)
    if message is not None:
        held = np.full_like(new, 0xA5)
        decode_exponents(held, message, item_bytes)
        assert np.array_equal(held, new)


def messages() -> list[tuple[Callable[..., Any], bytes, Bytes]]:
    """Return (decoder, message, memory to decode it into)."""
    old = weights(4, 4000, 2)
    random = np.random.default_rng(5)
    new = stepped(old, 2, random.choice(4000, 300, replace=False), random.integers(-2, 3, 300))
    delta, exponents = encode_delta(old, new, 2), encode_exponents(new, 2)
    assert delta is not None
    assert exponents is not None
    return [(apply_delta, delta, old), (decode_exponents, exponents, np.zeros(8000, np.uint8))]


@pytest.mark.parametrize("which", [0, 1])
@given(data=st.data())
def test_damaged_messages_leave_the_memory_alone(which: int, data: st.DataObject) -> None:
    decode, message, memory = messages()[which]
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    text = bytes(damaged[: data.draw(st.integers(0, len(damaged)))]) if data.draw(st.booleans()) else bytes(damaged)
    held = memory.copy()
    try:
        decode(held, text, 2)
    except ValueError:
        assert np.array_equal(held, memory)


@pytest.mark.parametrize("which", [0, 1])
def test_messages_for_other_memory_are_refused(which: int) -> None:
    decode, message, memory = messages()[which]
    for size in (memory.size - 2, memory.size + 2):
        with pytest.raises(ValueError, match="4000"):
            decode(np.zeros(size, np.uint8), message, 2)
    with pytest.raises(ValueError, match="more"):
        decode(memory.copy(), message + b"x", 2)
    with pytest.raises(ValueError, match="whole elements"):
        decode(np.zeros(7, np.uint8), message, 2)


@pytest.mark.parametrize("stream", [np.zeros(50, np.uint8), np.arange(50, dtype=np.uint8)])
def test_a_stream_of_another_length_is_refused(stream: Bytes) -> None:
    message = memoryview(packed(stream))
    found, end = unpacked(message, 0, 50)
    assert np.array_equal(found, stream)
    assert end == len(message)
    for length in (49, 51, 1 << 60):
        with pytest.raises(ValueError, match="expected"):
            unpacked(message, 0, length)


def test_versions_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="8 and 10 bytes"):
        encode_delta(np.zeros(8, np.uint8), np.zeros(10, np.uint8), 2)


def test_both_ends_use_what_both_know() -> None:
    assert common(KNOWN, KNOWN) == tuple(Coding)
    assert common(KNOWN, ["exponent", "of a later version"]) == (Coding.FULL, Coding.EXPONENT)
    assert common([], KNOWN) == (Coding.FULL,)


def test_a_coding_is_used_only_where_it_pays() -> None:
    delta = Costs(coding=Coding.DELTA, ratio=0.02, encode_bytes_per_s=1e9, decode_bytes_per_s=2e9)
    exponent = Costs(coding=Coding.EXPONENT, ratio=0.7, encode_bytes_per_s=5e8, decode_bytes_per_s=1e9)
    assert choose([delta, exponent], 10e9) is Coding.FULL
    assert choose([delta, exponent], 10e9, encode_cores=16, decode_cores=16) is Coding.DELTA
    assert choose([delta, exponent], 0.98e9) is Coding.FULL  # two percent faster is not worth it
    assert choose([None, exponent], 0.3e9) is Coding.EXPONENT
    assert choose([delta, exponent], 0.3e9) is choose([exponent, delta], 0.3e9) is Coding.DELTA
    assert choose([None, None], 0.3e9) is Coding.FULL
    with pytest.raises(ValueError, match="above 0"):
        choose([delta], 0.0)


def test_a_sample_is_coded_for_real() -> None:
    old = weights(6, 3 << 20, 2)  # longer than what is tried
    where = np.random.default_rng(7).choice(3 << 20, 20_000, replace=False)
    new = stepped(old, 2, where, np.ones(where.size, np.int64))
    delta, exponent = measure(Coding.DELTA, new, 2, old), measure(Coding.EXPONENT, new, 2)
    assert delta is not None
    assert exponent is not None
    assert delta.ratio < 0.02 < 0.5 < exponent.ratio < 0.75
    assert min(delta.encode_bytes_per_s, delta.decode_bytes_per_s, exponent.encode_bytes_per_s) > 0
    assert measure(Coding.DELTA, weights(8, 3 << 20, 2), 2, old) is None
    for asked in (Coding.FULL, Coding.DELTA):
        with pytest.raises(ValueError, match=asked.value):
            measure(asked, new, 2)
