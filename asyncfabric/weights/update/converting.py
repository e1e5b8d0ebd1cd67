"""Casting, quantising and measuring matrices of weights, compiled. On worker threads; lets go of the GIL.

The bits are those of `arithmetic`; numpy, which goes over each element a dozen times, does what nothing was compiled
for: other kinds, and matrices whose elements are next to each other neither in rows nor in columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric._bridge.converting import CASTS, KINDS, Converting
from asyncfabric._bridge.native import native_converting
from asyncfabric.weights.formats import BLOCK
from asyncfabric.weights.plan import Kind

Elements = NDArray[Any]
Floats = NDArray[np.float32]

_converting = cache(native_converting)


def convert_plane(out: Elements, plane: Elements, kind: Kind, scales: Floats | None, row: int, column: int) -> bool:
    """Cast or quantise a matrix into memory, if that is compiled; return whether it was done.

    Args:
        out: where to, in its shape.
        plane: elements as stored, (rows, columns).
        kind: its types.
        scales: of exactly the blocks that it touches; None when nothing is quantised.
        row: where it begins in the parameter.
        column: the same.
    """
    loops: Converting | None = _converting()
    if loops is None or kind.dtype not in KINDS or (scales is None and (kind.dtype, kind.to) not in CASTS):
        return False
    source, turned = _bytes(plane), out.strides[1] != out.itemsize
    into = _bytes(out.T if turned else out)
    if source is None or into is None:
        return False
    if scales is None:
        loops.cast(source, KINDS[kind.dtype], KINDS[kind.to], into, turned)
    else:
        at = row % BLOCK, column % BLOCK
        loops.quantise(source, KINDS[kind.dtype], *at, np.ascontiguousarray(scales), into, turned)
    return True


def measure_plane(found: Floats, plane: Elements, dtype: str, row: int, column: int) -> bool:
    """Write the maxima of the blocks that a matrix touches, if that is compiled; return whether it was done."""
    loops: Converting | None = _converting()
    source = _bytes(plane)
    if loops is None or source is None or dtype not in KINDS:
        return False
    loops.measure(source, KINDS[dtype], row % BLOCK, column % BLOCK, found)
    return True


def _bytes(plane: Elements) -> NDArray[np.uint8] | None:
    """Return rows of bytes, where the elements of a row are next to each other."""
    return plane.view(np.uint8) if plane.size and plane.strides[1] == plane.itemsize else None
