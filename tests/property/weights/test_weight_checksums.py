"""Checksums of weights: any flipped byte is found, in its chunk, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.weights.memory.checksums import checksums, chunks_of, wrong_chunks


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
