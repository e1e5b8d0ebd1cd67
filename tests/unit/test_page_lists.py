"""Page lists: every kind of integers becomes the same int64 buffer, everything else is refused by name."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric._api.pages import check_pages, page_array

NUMBERS = [0, 3, 2, 2, 40]
SPREAD = [number for number in NUMBERS for _ in (0, 1)]

KINDS: dict[str, Any] = {
    "list": NUMBERS,
    "tuple": tuple(NUMBERS),
    "numpy in list": [np.int32(number) for number in NUMBERS],
    "set of nothing": set(),
    "dict keys": dict.fromkeys([0, 3, 2, 40]).keys(),
    "range": range(2, 9, 3),
    "array q": array("q", NUMBERS),
    "array i": array("i", NUMBERS),
    "int64": np.array(NUMBERS),
    "int16": np.array(NUMBERS, np.int16),
    "uint64": np.array(NUMBERS, np.uint64),
    "strided": np.array(SPREAD)[::2],
    "big endian": np.array(NUMBERS, ">i8"),
    "empty floats": np.array([]),
    "tensor": torch.tensor(NUMBERS),
    "tensor int32": torch.tensor(NUMBERS, dtype=torch.int32),
    "strided tensor": torch.tensor(SPREAD)[::2],
    "empty tensor": torch.tensor([]),
    "memoryview q": memoryview(array("q", NUMBERS)),
    "memoryview of numpy": memoryview(np.array(NUMBERS)),
    "memoryview i": memoryview(array("i", NUMBERS)),
    "strided memoryview": memoryview(array("q", SPREAD))[::2],
}


@pytest.mark.parametrize("kind", KINDS)
def test_integers_of_every_kind_become_the_same_buffer(kind: str) -> None:
    view = memoryview(page_array("pages", KINDS[kind]))
    assert (view.ndim, view.itemsize, view.c_contiguous) == (1, 8, True)
    assert view.cast("B").cast("q").tolist() == [int(number) for number in KINDS[kind]]


@pytest.mark.parametrize("pages", [array("q", NUMBERS), np.array(NUMBERS)], ids=["array", "ndarray"])
def test_what_is_int64_already_is_not_copied(pages: Any) -> None:
    assert page_array("pages", pages) is pages or np.shares_memory(page_array("pages", pages), pages)


@pytest.mark.parametrize(
    ("pages", "error", "states"),
    [
        ([1, 2.0], TypeError, r"pages\[1\] must be an integer, got float 2.0"),
        ([True], TypeError, r"pages\[0\] must be an integer, got the bool True"),
        ([None], TypeError, "NoneType"),
        ([1 << 63], ValueError, "beyond 64 bits: 9223372036854775808"),
        ([-(1 << 63) - 1, 5], ValueError, "beyond 64 bits: -9223372036854775809..5"),
        ("12", TypeError, "str"),
        (b"12", TypeError, "bytes"),
        (7, TypeError, "int"),
        (None, TypeError, "NoneType"),
        (array("d", [1.0]), TypeError, "array of type 'd'"),
        (np.array([1.5]), TypeError, "array of float64"),
        (np.array([True]), TypeError, "array of bool"),
        (np.zeros((2, 2), int), ValueError, r"one dimension, got shape \(2, 2\)"),
        (np.array(3), ValueError, r"one dimension, got shape \(\)"),
        (np.array([1 << 63], np.uint64), ValueError, "9223372036854775808"),
        (torch.tensor([1.5]), TypeError, "tensor of torch.float32"),
        (torch.tensor([True]), TypeError, "tensor of torch.bool"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"one dimension, got shape \(2, 2\)"),
        (memoryview(bytes(16)).cast("q", (2, 1)), ValueError, "one dimension, got 2"),
        (memoryview(array("d", [1.0])), TypeError, "float"),
    ],
)
def test_other_things_are_refused_by_name(pages: Any, error: type[Exception], states: str) -> None:
    with pytest.raises(error, match=states) as caught:
        page_array("pages", pages)
    assert str(caught.value).startswith("pages")


@given(
    st.lists(st.integers(-5, 300), max_size=20),
    st.integers(1, 64),
    st.integers(0, 80),
    st.integers(0, 100),
    st.integers(0, 8192),
)
def test_a_page_is_refused_exactly_when_it_leaves_its_bytes(
    pages: list[int], page_bytes: int, stride: int, offset: int, length: int
) -> None:
    ends = [offset + page * stride + page_bytes for page in pages]
    bad = [n for n, (page, end) in enumerate(zip(pages, ends, strict=True)) if page < 0 or end > length]
    if not bad:
        check_pages("pages", array("q", pages), page_bytes, stride, offset, length, "the key")
        return
    with pytest.raises(ValueError, match="leaves the key") as caught:
        check_pages("pages", array("q", pages), page_bytes, stride, offset, length, "the key")
    text = str(caught.value)
    assert f"pages[{bad[0]}] = {pages[bad[0]]} " in text and str(length) in text and str(ends[bad[0]]) in text
