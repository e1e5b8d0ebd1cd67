"""Boxes of whole quantisation blocks: one launch reads the weights once, and writes scales and float8.

No maximum comes to the host. On torch's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncfabric.weights.formats import BLOCK, SCALE_BYTES
from asyncfabric.weights.plan import Kind
from asyncfabric.weights.update.cuda.kernels import WHOLE, Kernels
from asyncfabric.weights.update.device import Blocks

VECTOR_BYTES = 16
"""What a thread loads at once."""


class WholeBox(NamedTuple):
    """How a box is told to the kernel: the same for all versions.

    Attributes:
        dtype: of the weights.
        rows: of WHOLE, one for each matrix; `out` and `scales` count from where the box's begin.
        blocks: quantisation blocks of all of them.
    """

    dtype: str
    rows: NDArray[np.void]
    blocks: int


def whole_box(
    box: Tensor, kind: Kind, sizes: Sequence[int], axes: Sequence[int], scale_axes: Sequence[int]
) -> WholeBox | None:
    """Return how a box is told, None for one whose rows cannot be loaded and stored in vectors.

    Args:
        box: bits, (..., rows, columns); it begins with a block, and ends with one or with the parameter.
        kind: its types.
        sizes: of the float8 as they lie, outermost first.
        axes: which of those each dimension of the box is.
        scale_axes: the dimensions of the box as the scales lie, outermost first.
    """
    item = box.element_size()
    strides = _strides(sizes, axes)
    lead, rows, columns = _columns(box.shape), int(box.shape[-2]), int(box.shape[-1])
    turned = strides[-1] != 1
    whole = all(stride * item % VECTOR_BYTES == 0 for stride in box.stride()[:-1])
    whole = whole and box.stride(-1) == 1 and box.data_ptr() % VECTOR_BYTES == 0
    whole = whole and columns * item % VECTOR_BYTES == 0
    if turned:
        whole = whole and strides[-2] == 1 and rows % VECTOR_BYTES == 0
        whole = whole and all(stride % VECTOR_BYTES == 0 for at, stride in enumerate(strides) if at != box.dim() - 2)
    else:
        whole = whole and all(stride % 8 == 0 for stride in strides[:-1])
    if not whole:
        return None
    blocks = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
    scales = _strides([blocks[axis] for axis in scale_axes], np.argsort(scale_axes).tolist())
    places = list(np.ndindex(*lead[:-1]))
    told = np.zeros(len(places), WHOLE)
    deep = lead[-1] if lead else 1
    for one, place in zip(told, places, strict=True):
        one["source"] = box[place].data_ptr() if place else box.data_ptr()
        one["out"] = sum(at * stride for at, stride in zip(place, strides, strict=False))
        one["scales"] = SCALE_BYTES * sum(at * stride for at, stride in zip(place, scales, strict=False))
    told["lead_stride"], told["row_stride"] = box.stride(-3) if lead else 0, box.stride(-2)
    told["out_strides"] = (strides[-3] if lead else 0, *strides[-2:])
    told["scale_strides"] = (scales[-3] if lead else 0, *scales[-2:])
    told["rows"], told["columns"], told["block_rows"], told["block_columns"] = rows, columns, *blocks[-2:]
    each = deep * blocks[-2] * blocks[-1]
    told["first"] = np.arange(len(places)) * each
    return WholeBox(kind.dtype, told, len(places) * each)


def quantise_whole(kernels: Kernels, boxes: Sequence[Blocks]) -> None:
    """Begin to quantise boxes that `whole_box` told."""
    for dtype, some in groupby(boxes, lambda one: one.how.dtype):
        together = list(some)
        told = np.concatenate([one.how.rows for one in together])
        at = first = 0
        for how, out, scales in together:
            part = told[at : at + len(how.rows)]
            part["out"] += np.uint64(out.data_ptr())
            part["scales"] += np.uint64(scales.data_ptr())
            part["first"] += np.uint32(first)
            at, first = at + len(how.rows), first + how.blocks
        kernels.whole(dtype, told, first)


def _columns(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in shape[:-2])


def _strides(sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return the strides of contiguous elements, by the dimensions that `axes` says."""
    found = np.concatenate([np.cumprod(np.array(sizes[::-1], np.int64))[::-1][1:], [1]])
    return [int(found[axis]) for axis in axes]
