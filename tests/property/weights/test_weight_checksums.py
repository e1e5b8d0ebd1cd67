"""Checksums of weights: any flipped byte is found, in its chunk, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.weights.memory.checksums import MASK64, checksums, chunks_of, sum_words, wrong_chunks

LAST_PLACE = (1 << 32) - 1


@given(st.integers(0, 300), st.integers(1, 64), st.data())
def test_a_flipped_byte_is_found_in_its_chunk(length: int, chunk_bytes: int, data: st.DataObject) -> None:
    memory = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    expected = checksums(memory, chunk_bytes)
    assert expected.size == -(-length // chunk_bytes)
    covered = np.concatenate([np.arange(length)[part] for part in chunks_of(length, chunk_bytes)] or [np.arange(0)])
    assert np.array_equal(covered, np.arange(length))
    assert wrong_chunks(checksums(memory, chunk_bytes), expected) == []
    if length:
        at = data.draw(st.integers(0, length - 1))
        memory[at] ^= data.draw(st.integers(1, 255))
        assert wrong_chunks(checksums(memory, chunk_bytes), expected) == [at // chunk_bytes]


def test_bytes_that_are_missing_are_reported() -> None:
    memory = np.zeros(100, dtype=np.uint8)
    with pytest.raises(ValueError, match="10 chunks, got 9 checksums"):
        wrong_chunks(checksums(memory, 10), checksums(memory[:90], 10))


@given(st.integers(0, 3000), st.integers(0, 5000), st.sampled_from([0, 1, LAST_PLACE - 100]))
def test_the_compiled_sum_is_that_of_numpy(length: int, cut: int, place: int) -> None:
    native = pytest.importorskip("asyncfabric._native", reason="needs the compiled engine: make build")
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    assert native.sum_words(data, place) == sum_words(data, place)
    cut -= cut % 4
    parts = sum_words(data[:cut], place) + sum_words(data[cut:], place + cut // 4)
    assert native.sum_words(data, place) == parts & MASK64


def test_the_sum_of_numpy_goes_on_behind_a_block() -> None:
    native = pytest.importorskip("asyncfabric._native", reason="needs the compiled engine: make build")
    data = np.random.default_rng(1).integers(0, 256, 400_003, dtype=np.uint8)
    assert native.sum_words(data, LAST_PLACE - 5) == sum_words(data, LAST_PLACE - 5)
