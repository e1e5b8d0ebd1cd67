"""Prepared lists of Nx3 and Nx5 arrays, and transfers of some of their entries, on both faces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from two_agents import BYTES, TwoAgents

PAGE = 4096
PAGES = 16


def go(two: TwoAgents, local: Any, here: Any, remote: Any, there: Any, operation: str = "WRITE") -> str:
    handle = two.a.make_prepped_xfer(operation, local, here, remote, there)
    state = two.ran(handle)
    two.a.release_xfer_handle(handle)
    return state


def strided(two: TwoAgents, side: str, *rows: tuple[int, int, int, int], dtype: Any = np.uint64) -> Any:
    """Prepare rows of (offset, length, stride, count)."""
    base = (two.target if side == "b" else two.source).ctypes.data
    array = np.array([(base + at, length, 0, stride, count) for at, length, stride, count in rows], dtype)
    return two.a.prep_xfer_dlist(side, array, "DRAM")


@pytest.mark.parametrize("side", ["", "NIXL_INIT_AGENT"])
def test_entries_are_chosen_by_index(two: TwoAgents, side: str) -> None:
    local, remote = two.pages(side, PAGE, PAGES), two.pages("b", PAGE, PAGES)
    untouched = two.target[: 2 * PAGE].copy()
    assert go(two, local, [0, 1, 5], remote, [2, 3, 7]) == "DONE"
    for here, there in ((0, 2), (1, 3), (5, 7)):
        assert two.same(here * PAGE, PAGE, there * PAGE)
    assert (two.target[: 2 * PAGE] == untouched).all()


def test_entries_are_read(two: TwoAgents) -> None:
    local, remote = two.pages("", PAGE, PAGES), two.pages("b", PAGE, PAGES)
    kept = two.target.copy()
    assert go(two, local, [9, 0], remote, [3, 4], "READ") == "DONE"
    assert two.same(9 * PAGE, PAGE, 3 * PAGE) and two.same(0, PAGE, 4 * PAGE) and (two.target == kept).all()


@pytest.mark.parametrize(
    "indices",
    [(0, 1), range(2), *(np.array([0, 1], dtype) for dtype in (np.int32, np.int64, np.uint64))],
    ids=["tuple", "range", "int32", "int64", "uint64"],
)
def test_forms_of_indices(two: TwoAgents, indices: Any) -> None:
    assert go(two, two.pages("", PAGE, 2), indices, two.pages("b", PAGE, 2), indices) == "DONE"


def test_indices_that_cannot_be(two: TwoAgents) -> None:
    local, remote = two.pages("", PAGE, PAGES), two.pages("b", PAGE, PAGES)
    for here, there in (([PAGES], [0]), ([0], [PAGES]), ([-1], [0]), ([0, 1], [0]), ([], [])):
        with pytest.raises(two.face.error("InvalidParam")):
            go(two, local, here, remote, there)
    with pytest.raises(two.face.error("InvalidParam") if two.face.differs("numbers") else RuntimeError):
        go(two, local, [0.5], remote, [0])
    with pytest.raises(KeyError):
        go(two, local, [0], remote, [0], "COPY")


def test_the_same_source_page_goes_to_two_places(two: TwoAgents) -> None:
    assert go(two, two.pages("", PAGE, 2), [1, 1], two.pages("b", PAGE, 4), [2, 3]) == "DONE"
    assert two.same(PAGE, PAGE, 2 * PAGE) and two.same(PAGE, PAGE, 3 * PAGE)


def test_sides_are_not_exchanged(two: TwoAgents) -> None:
    local, remote, itself = (two.pages(side, PAGE, 2) for side in ("", "b", "a"))
    for left, right in ((remote, local), (local, local), (itself, remote)):
        with pytest.raises(two.face.error("InvalidParam")):
            go(two, left, [0], right, [0])


def test_a_list_of_the_own_name_is_a_remote_side(two: TwoAgents) -> None:
    assert go(two, two.pages("", PAGE, 4), [0], two.pages("a", PAGE, 4), [3]) == "DONE"
    assert (two.source[:PAGE] == two.source[3 * PAGE : 4 * PAGE]).all()


def test_lengths_of_entries_agree(two: TwoAgents) -> None:
    with pytest.raises(two.face.error("InvalidParam")):
        go(two, two.pages("", PAGE, 2), [0], two.pages("b", PAGE // 2, 2), [0])


def test_lists_that_cannot_be_prepared(two: TwoAgents) -> None:
    here, there = two.source.ctypes.data, two.target.ctypes.data
    for side, address in (("nobody", there), ("", there), ("b", here), ("b", there + BYTES - 2048)):
        with pytest.raises(two.face.error("NotFound")):
            two.a.prep_xfer_dlist(side, [(address, PAGE, 0)], "DRAM")
    for rows in ([], np.zeros((0, 3), np.uint64)):
        with pytest.raises(IndexError):
            two.a.prep_xfer_dlist("b", rows, "DRAM")
    for rows, memory in (
        ([(there, PAGE, 0)], None),
        (np.zeros((1, 4), np.uint64), "DRAM"),
        ([(there, PAGE, 0, PAGE, 4)], "DRAM"),
    ):
        with pytest.raises(TypeError):
            two.a.prep_xfer_dlist("b", rows, memory)
    with pytest.raises(KeyError):
        two.a.prep_xfer_dlist("b", [(there, PAGE, 0)], "DRAM", ["NOPE"])


def test_strided_rows_are_numbered_through(two: TwoAgents) -> None:
    local = strided(two, "", (100, 1024, 1024, 6))
    remote = strided(two, "b", (0, 1024, PAGE, 4), (65536, 1024, 1024, 2))
    expected = two.target.copy()
    places = [0, PAGE, 2 * PAGE, 3 * PAGE, 65536, 65536 + 1024]
    order = [3, 0, 5, 1, 4, 2]
    assert go(two, local, range(6), remote, order) == "DONE"
    for index, place in enumerate(order):
        at = places[place]
        expected[at : at + 1024] = two.source[100 + index * 1024 : 1124 + index * 1024]
    assert (two.target == expected).all()


def test_strided_rows_meet_plain_ones(two: TwoAgents) -> None:
    local, remote = two.pages("", 1024, 8), strided(two, "b", (0, 1024, PAGE, 8))
    assert go(two, local, [0, 3], remote, [5, 0]) == "DONE"
    assert two.same(0, 1024, 5 * PAGE) and two.same(3 * 1024, 1024, 0)


def test_strided_rows_have_lengths_of_their_own(two: TwoAgents) -> None:
    rows = ((0, PAGE, 2 * PAGE, 4), (131072, 2048, 2048, 2))
    local, remote = strided(two, "", *rows, dtype=np.int64), strided(two, "b", *rows)
    assert go(two, local, [0, 5], remote, [3, 4]) == "DONE"
    assert two.same(0, PAGE, 6 * PAGE) and two.same(131072 + 2048, 2048, 131072)
    with pytest.raises(two.face.error("InvalidParam")):
        go(two, local, [0], remote, [4])
    with pytest.raises(two.face.error("InvalidParam")):
        go(two, local, [6], remote, [0])


@pytest.mark.parametrize(
    "row",
    [(0, PAGE, 2048, 4), (0, PAGE, 0, 4), (0, PAGE, PAGE, 0), (0, PAGE, PAGE, 400)],
    ids=["overlapping", "no stride", "no blocks", "beyond the registration"],
)
def test_strides_that_cannot_be(two: TwoAgents, row: tuple[int, int, int, int]) -> None:
    with pytest.raises(two.face.error("NotFound")):
        strided(two, "b", row)


def test_strided_rows_name_their_memory_type(two: TwoAgents) -> None:
    with pytest.raises(ValueError):
        two.a.prep_xfer_dlist("b", np.zeros((1, 5), np.uint64))


def test_a_released_list_makes_no_transfer_and_harms_none(two: TwoAgents) -> None:
    local, remote = two.pages("", PAGE, 2), two.pages("b", PAGE, 2)
    handle = two.a.make_prepped_xfer("WRITE", local, [0], remote, [1])
    two.a.release_dlist_handle(local)
    two.a.release_dlist_handle(local)
    assert two.ran(handle) == "DONE" and two.same(0, PAGE, PAGE)
    if two.face.differs("freed"):
        with pytest.raises(two.face.error("InvalidParam")):
            go(two, local, [0], remote, [0])


def test_entries_of_two_registrations_go_together(two: TwoAgents) -> None:
    more = np.zeros(2 * PAGE, np.uint8)
    registered = two.b.register_memory([(more.ctypes.data, 2 * PAGE, 0, "")], "DRAM")
    two.meet()
    rows = [(two.target.ctypes.data, PAGE, 0), (more.ctypes.data, PAGE, 0), (more.ctypes.data + PAGE, PAGE, 0)]
    assert go(two, two.pages("", PAGE, 3), [0, 1, 2], two.a.prep_xfer_dlist("b", rows, "DRAM"), [2, 0, 1]) == "DONE"
    assert (more[PAGE:] == two.source[:PAGE]).all() and two.same(PAGE, PAGE, 0)
    assert (more[:PAGE] == two.source[2 * PAGE : 3 * PAGE]).all()
    two.b.deregister_memory(registered)
