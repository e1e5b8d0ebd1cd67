"""Loads the compiled loops when they are first asked for, so that weights and plans work where nothing was built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric.errors import DeviceError

if TYPE_CHECKING:
    from asyncfabric._kernels.converting import Converting
    from asyncfabric._kernels.ordering import Ordering
    from asyncfabric._kernels.picking import Picking
    from asyncfabric._kernels.records import RecordLoops
    from asyncfabric._kernels.rows import RowLoops  # imports numpy, and with it threads that a fabric has no use for
    from asyncfabric._kernels.summing import MakeBoxSums, SumWords

_REMEDY = "run `make build`, or `pip install asyncfabric` on a machine with a C++20 compiler; `make test` needs it too"


def _refused(error: ImportError) -> DeviceError:
    return DeviceError(f"the compiled loops cannot be loaded: {error}", remedy=_REMEDY)


def native_row_loops() -> RowLoops:
    """Return the compiled row loops, see `rows`. Raises DeviceError when nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError as error:
        raise _refused(error) from error
    return _native.row_loops


def native_record_loops() -> RecordLoops:
    """Return compiled routes and records, see `records`. Raises DeviceError when nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError as error:
        raise _refused(error) from error
    return _native.record_loops


def native_ordering() -> Ordering | None:
    """Return the compiled pass over boxes of weights; None where nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError:
        return None
    return _native.ordering


def native_picking() -> Picking | None:
    """Return the compiled pass over positions; None where nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError:
        return None
    return _native.picking


def native_box_sums() -> MakeBoxSums | None:
    """Return what makes tables of boxes that are summed; None where nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError:
        return None
    return _native.BoxSums


def native_sum_words() -> SumWords | None:
    """Return the compiled sum of words; None where nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError:
        return None
    return _native.sum_words


def native_converting() -> Converting | None:
    """Return compiled conversions of weights; None where nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError:
        return None
    return _native.converting
