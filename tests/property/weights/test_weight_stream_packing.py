"""Ring 2: whatever tensors a stream has, each of their bytes lies once in a bucket, and all ranks place them alike."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="THE PACKING OF WEIGHT STREAMS WAS NOT TRIED: torch is not installed")

from asyncfabric.integrations.weight_stream.packing import ALIGNMENT, Packing  # noqa: E402

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
Stream = st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 40), max_size=3)), max_size=12)


@given(Stream, st.integers(64, 5000))
def test_each_byte_lies_once_and_whole_where_it_fits(stream: list[tuple[torch.dtype, list[int]]], room: int) -> None:
    packing, again = Packing(room), Packing(room)
    taken: set[tuple[int, int]] = set()
    last = 0
    for number, (dtype, shape) in enumerate(stream):
        parts = list(packing.parts(str(number), dtype, shape))
        assert parts == list(again.parts(str(number), dtype, shape))
        size, begin = prod(shape) * dtype.itemsize, 0
        assert len(parts) == 1 or size > packing.bucket_bytes
        for bucket, part in parts:
            assert part.begin == begin and part.place % ALIGNMENT == 0 and part.tensor_bytes() == size
            assert bucket >= last and part.place + part.length <= packing.bucket_bytes <= room
            cells = {(bucket, part.place + byte) for byte in range(part.length)}
            assert not cells & taken
            taken |= cells
            begin, last = begin + part.length, bucket
        assert begin == size
    assert packing.digest() == again.digest()


def test_streams_that_differ_have_other_digests() -> None:
    streams = [("a", torch.float32, [2, 3]), ("a", torch.float32, [3, 2]), ("b", torch.float32, [2, 3])]
    digests = set()
    for name, dtype, shape in streams:
        packing = Packing(64)
        list(packing.parts(name, dtype, shape))
        digests.add(packing.digest())
    assert len(digests) == 3
