"""The shelf of rows: memory comes back when nobody holds it, and makes way for larger memory when it is too small."""

from __future__ import annotations

from asyncfabric.moe.host.shelf import LEAST_BYTES, Shelf

WIDTH = 1024
ROWS = LEAST_BYTES // WIDTH


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    shelf = Shelf(1)
    held = shelf.rows(ROWS, WIDTH)
    address = held.ctypes.data
    part = held[3:4]
    del held
    assert shelf.rows(ROWS, WIDTH).ctypes.data != address, "a view of it was still held"
    del part
    assert shelf.rows(ROWS, WIDTH).ctypes.data == address


def test_what_is_too_small_makes_way_also_behind_what_is_held() -> None:
    """The one that is taken from a full shelf need not be the first, and only it is taken."""
    shelf = Shelf(3)
    first, second, third = (shelf.rows(ROWS, WIDTH) for _ in range(3))
    kept = shelf.kept_bytes
    address = third.ctypes.data
    del second
    larger = shelf.rows(4 * ROWS, WIDTH)
    assert larger.shape == (4 * ROWS, WIDTH)
    assert shelf.kept_bytes > kept * 5 // 3, "the larger memory is not on the shelf"
    first[:], larger[:] = 1, 2
    assert (first == 1).all()
    del third
    assert shelf.rows(ROWS, WIDTH).ctypes.data == address, "another place than the small one was taken"
