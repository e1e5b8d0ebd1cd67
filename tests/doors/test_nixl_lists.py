"""Descriptor lists: forms of input that are taken, refused and returned, on the real NIXL and on ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faces import Face
from two_agents import TwoAgents

ROWS = [(1, 2, 3), (4, 5, 6)]
REG_ROWS = [(1, 2, 3, "meta"), (4, 5, 6, b"\xff")]


def assert_no_list(face: Face, call: Callable[[], Any]) -> None:
    """Check that a form is refused: by None, or by an error at once."""
    if face.differs("forms"):
        with pytest.raises(TypeError):
            call()
    else:
        assert call() is None


def rows_of(descs: Any) -> list[tuple[Any, ...]]:
    return [descs[index] for index in range(descs.descCount())]


def test_tuples_and_arrays_make_equal_lists(two: TwoAgents) -> None:
    descs = two.a.get_xfer_descs(ROWS, "DRAM")
    assert rows_of(descs) == ROWS
    assert descs.getType() == two.face.bindings.DRAM_SEG and not descs.isEmpty()
    for dtype in (np.uint64, np.int64):
        assert two.a.get_xfer_descs(np.array(ROWS, dtype), "DRAM") == descs
    assert two.a.get_xfer_descs(ROWS, "VRAM") != descs


def test_a_list_that_is_given_is_the_list_that_is_returned(two: TwoAgents) -> None:
    descs, regs = two.a.get_xfer_descs(ROWS, "DRAM"), two.a.get_reg_descs(REG_ROWS, "DRAM")
    assert two.a.get_xfer_descs(descs) is descs and two.a.get_reg_descs(regs) is regs
    assert_no_list(two.face, lambda: two.a.get_xfer_descs(regs))
    assert_no_list(two.face, lambda: two.a.get_reg_descs(descs))


def test_registration_lists_keep_their_meta(two: TwoAgents) -> None:
    regs = two.a.get_reg_descs(REG_ROWS, "VRAM")
    assert rows_of(regs) == [(1, 2, 3, b"meta"), (4, 5, 6, b"\xff")]
    assert rows_of(two.a.get_reg_descs(np.array(ROWS, np.uint64), "DRAM")) == [(*row, b"") for row in ROWS]
    trimmed = regs.trim()
    assert rows_of(trimmed) == ROWS and trimmed.getType() == two.face.bindings.VRAM_SEG


def test_old_names_of_memory_types_still_work(two: TwoAgents) -> None:
    assert two.a.get_xfer_descs(ROWS, "cpu").getType() == two.face.bindings.DRAM_SEG
    assert two.a.get_xfer_descs(ROWS, "cuda").getType() == two.face.bindings.VRAM_SEG


def test_tensors_name_their_own_memory(two: TwoAgents) -> None:
    torch = pytest.importorskip("torch")
    first, second = torch.zeros(16), torch.zeros((4, 4), dtype=torch.float64)
    expected = [(first.data_ptr(), 64, 0), (second.data_ptr(), 128, 0)]
    assert rows_of(two.a.get_xfer_descs([first, second])) == expected
    assert rows_of(two.a.get_xfer_descs(first)) == expected[:1]
    assert rows_of(two.a.get_reg_descs([first, second])) == [(*row, b"") for row in expected]
    for strided in (second[:, :2], [second[:, :2]]):
        assert_no_list(two.face, lambda given=strided: two.a.get_xfer_descs(given))


@pytest.mark.parametrize(
    "rows",
    [[(1, 2, 3, 4)], [(1, 2)], [[1, 2, 3]], b"xx", np.zeros((1, 4), np.uint64)],
    ids=["4-tuple", "2-tuple", "list of lists", "bytes", "Nx4"],
)
def test_other_forms_make_no_transfer_list(two: TwoAgents, rows: Any) -> None:
    assert_no_list(two.face, lambda: two.a.get_xfer_descs(rows, "DRAM"))


@pytest.mark.parametrize("rows", [[(1, 2, 3)], [[1, 2, 3, ""]], b"xx", np.zeros((1, 4), np.uint64)])
def test_other_forms_make_no_registration_list(two: TwoAgents, rows: Any) -> None:
    assert_no_list(two.face, lambda: two.a.get_reg_descs(rows, "DRAM"))


def test_a_memory_type_must_be_given_and_known(two: TwoAgents) -> None:
    assert_no_list(two.face, lambda: two.a.get_xfer_descs(ROWS))
    assert_no_list(two.face, lambda: two.a.get_reg_descs(REG_ROWS))
    assert_no_list(two.face, lambda: two.a.get_xfer_descs(np.array(ROWS, np.uint64)))
    for call, rows in ((two.a.get_xfer_descs, ROWS), (two.a.get_reg_descs, REG_ROWS)):
        with pytest.raises(KeyError):
            call(rows, "NOPE")
        with pytest.raises(IndexError):
            call([], "DRAM")


@pytest.mark.parametrize("address", [-1, 1.5], ids=["negative", "float"])
def test_numbers_that_are_no_address_are_refused(two: TwoAgents, address: Any) -> None:
    with pytest.raises((TypeError, ValueError) if two.face.differs("numbers") else RuntimeError):
        two.a.get_xfer_descs([(address, 2, 3)], "DRAM")


@pytest.mark.parametrize(
    "array",
    [
        np.array(ROWS, np.int32),
        np.asfortranarray(np.array(ROWS, np.uint64)),
        np.arange(12, dtype=np.uint64).reshape(2, 6)[:, ::2],
    ],
    ids=["int32", "fortran", "view"],
)
def test_arrays_are_contiguous_and_of_64_bits(two: TwoAgents, array: Any) -> None:
    if two.face.differs("arrays"):
        assert rows_of(two.a.get_xfer_descs(array, "DRAM")) == [tuple(row) for row in array.tolist()]
    else:
        with pytest.raises(ValueError):
            two.a.get_xfer_descs(array, "DRAM")


def test_arrays_are_of_integers(two: TwoAgents) -> None:
    with pytest.raises(ValueError):
        two.a.get_xfer_descs(np.array(ROWS, np.float64), "DRAM")


def test_lists_are_edited_in_place(face: Face) -> None:
    descs = face.bindings.nixlXferDList(face.bindings.DRAM_SEG)
    assert descs.isEmpty() and descs.descCount() == 0
    descs.addDesc((1, 2, 3))
    descs.append((4, 5, 6))
    assert descs.index((4, 5, 6)) == 1
    with pytest.raises(face.error("NotFound")):
        descs.index((4, 5, 7))
    descs[0] = (7, 8, 9)
    assert rows_of(descs) == [(7, 8, 9), (4, 5, 6)]
    descs.remDesc(0)
    assert rows_of(descs) == [(4, 5, 6)]
    with pytest.raises(TypeError if face.differs("numbers") else IndexError):
        descs.addDesc((7, 8))
    if face.differs("freed"):
        with pytest.raises(IndexError):
            descs[1]
    descs.clear()
    assert descs.isEmpty()


def test_lists_are_made_by_the_bindings_too(face: Face) -> None:
    bindings = face.bindings
    assert rows_of(bindings.nixlXferDList(bindings.DRAM_SEG, ROWS)) == ROWS
    assert rows_of(bindings.nixlXferDList(bindings.DRAM_SEG, np.array(ROWS, np.uint64))) == ROWS
    assert rows_of(bindings.nixlRegDList(bindings.DRAM_SEG, [(1, 2, 3, "m")])) == [(1, 2, 3, b"m")]


def test_lists_survive_serialization(two: TwoAgents) -> None:
    for descs in (two.a.get_xfer_descs(ROWS, "DRAM"), two.a.get_reg_descs(REG_ROWS, "VRAM")):
        serialized = two.a.get_serialized_descs(descs)
        assert isinstance(serialized, bytes)
        restored = two.b.deserialize_descs(serialized)
        assert restored == descs and restored.getType() == descs.getType() and rows_of(restored) == rows_of(descs)
    with pytest.raises(pickle.UnpicklingError):
        two.a.deserialize_descs(b"junk")


def test_error_classes_are_the_twelve(face: Face) -> None:
    names = (
        "Backend Cancelled InvalidParam Mismatch NoTelemetry NotAllowed NotFound NotPosted NotSupported "
        "RemoteDisconnect RepostActive Unknown"
    )
    for name in names.split():
        assert face.error(name).__mro__[1] is Exception, name
