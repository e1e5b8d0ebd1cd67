"""Page lists of every kind become the same int64 buffer; arrays that are one already are not copied."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric._api.pages import check_pages, page_array

NUMBERS = [5, 0, 3, 3, 1 << 40]


@pytest.mark.parametrize(
    "pages",
    [
        NUMBERS,
        tuple(NUMBERS),
        [5, np.int64(0), 3, torch.tensor(3), 1 << 40],
        np.array(NUMBERS),
        np.array(NUMBERS, np.uint64),
        np.array([number for number in NUMBERS for _ in range(2)])[::2],
        np.array(NUMBERS, ">i8"),
        torch.tensor(NUMBERS),
        torch.tensor(NUMBERS).repeat_interleave(2)[::2],
        array("q", NUMBERS),
        array("Q", NUMBERS),
        memoryview(array("q", NUMBERS)),
        memoryview(np.array(NUMBERS)),
        memoryview(np.array(NUMBERS, np.uint64)),
        memoryview(array("q", [number for number in NUMBERS for _ in range(2)]))[::2],
        dict.fromkeys([5, 0, 3]),
        range(3),
        iter(NUMBERS),
    ],
    ids=lambda pages: type(pages).__name__,
)
def test_every_kind_of_list(pages: Any) -> None:
    expected = {dict: [5, 0, 3], range: [0, 1, 2]}.get(type(pages), NUMBERS)
    view = memoryview(page_array("pages", pages))
    assert view.tolist() == expected
    assert view.format in ("q", "l") and view.itemsize == 8 and view.c_contiguous


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32])
def test_small_integers_widen(dtype: Any) -> None:
    assert memoryview(page_array("pages", np.array([1, 2, 3], dtype))).tolist() == [1, 2, 3]
    if dtype is not np.uint32:
        assert memoryview(page_array("pages", torch.from_numpy(np.array([1, 2, 3], dtype)))).tolist() == [1, 2, 3]


@pytest.mark.parametrize("pages", [[], (), np.array([]), torch.tensor([]), array("q"), range(0), memoryview(b"")])
def test_empty_lists_of_every_kind(pages: Any) -> None:
    assert len(page_array("pages", pages)) == 0


def test_int64_arrays_are_taken_as_they_are() -> None:
    numbers = np.array(NUMBERS)
    assert page_array("pages", numbers) is numbers
    tensor = torch.tensor(NUMBERS)
    assert page_array("pages", tensor).ctypes.data == tensor.data_ptr()
    plain = array("q", NUMBERS)
    assert page_array("pages", plain) is plain


@pytest.mark.parametrize(
    ("pages", "error", "states"),
    [
        ([1.0], TypeError, r"pages\[0\].*float 1\.0"),
        ([0, True], TypeError, r"pages\[1\].*bool"),
        (["1"], TypeError, "str"),
        ([[1]], TypeError, "list"),
        ("123", TypeError, "str"),
        (b"123", TypeError, "bytes"),
        (3, TypeError, "int"),
        (None, TypeError, "NoneType"),
        (np.array([1.5]), TypeError, "float64"),
        (np.array([True]), TypeError, "bool"),
        (np.zeros((1, 1), int), ValueError, r"\(1, 1\)"),
        (np.array([1 << 63], np.uint64), ValueError, "9223372036854775808"),
        (torch.tensor([1.5]), TypeError, "float32"),
        (torch.tensor([True]), TypeError, "bool"),
        (torch.zeros(1, 1, dtype=torch.int64), ValueError, r"\(1, 1\)"),
        (array("d", [1.0]), TypeError, "'d'"),
        (array("Q", [1 << 63]), ValueError, "64 bits"),
        (memoryview(np.zeros((1, 1), np.int64)), ValueError, "got 2"),
        ([1 << 63], ValueError, "64 bits"),
        ([-(1 << 63) - 1], ValueError, "64 bits"),
    ],
)
def test_other_things_are_refused(pages: Any, error: type[Exception], states: str) -> None:
    with pytest.raises(error, match=states):
        page_array("pages", pages)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_numbers_are_kept(numbers: list[int]) -> None:
    for pages in (numbers, np.array(numbers, np.int64), torch.tensor(numbers, dtype=torch.int64)):
        assert memoryview(page_array("pages", pages)).tolist() == numbers


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 64), st.integers(0, 80), st.integers(0, 100))
def test_the_page_that_leaves_is_found(pages: list[int], size: int, stride: int, offset: int) -> None:
    bound = 1000
    bad = [page for page in pages if offset + page * stride + size > bound]
    if not bad:
        check_pages("pages", array("q", pages), size, stride, offset, bound, "memory")
        return
    with pytest.raises(ValueError, match=rf"pages\[{pages.index(bad[0])}\] = {bad[0]} leaves memory"):
        check_pages("pages", array("q", pages), size, stride, offset, bound, "memory")
