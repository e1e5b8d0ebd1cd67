"""Boxes on their way into the staging memory: all of a unit that are alike are one launch, which reads them once.

Those of whole quantisation blocks have their scales found on the way, so no maximum comes to the host. On torch's
current stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asyncfabric.weights.memory.device import PlacedBox
from asyncfabric.weights.memory.gpu.kernels import WHOLE, WHOLES, WeightKernels
from asyncfabric.weights.plan.formats import BLOCK, SCALE_BYTES, STORED_AS
from asyncfabric.weights.plan.parts import MoveKind

TILE = 64
"""Rows and columns that a block of threads lays at once."""


class BoxPart(NamedTuple):
    """Three dimensions of a box: fields of WHOLE; `out` and `scales` count from where the box's begin."""

    source: tuple[int, ...]
    out: int
    out_strides: tuple[int, ...]
    scales: int
    shape: tuple[int, ...]


class KernelBox(NamedTuple):
    """How a box is described to a kernel: the same for all versions.

    Attributes:
        kernel: its name.
        parts: of three dimensions each.
        tiles: of all of them.
    """

    kernel: str
    parts: tuple[BoxPart, ...]
    tiles: int


def kernel_box(
    box: Tensor, kind: MoveKind, sizes: Sequence[int], axes: Sequence[int], scale_axes: Sequence[int]
) -> KernelBox | None:
    """Return how a box is described, None for one that no kernel takes: whose rows are no vectors, or of single bytes.

    Args:
        box: bits, (..., rows, columns). One that is quantised begins with a block, and ends with one or with the
            parameter.
        kind: its types.
        sizes: of the elements as they lie at the receiver, outermost first.
        axes: which of those each dimension of the box is.
        scale_axes: the dimensions of the box as its scales lie, outermost first; empty without.
    """
    side = BLOCK if kind.block else TILE
    strides = _strides(sizes, axes, STORED_AS[kind.to].itemsize)
    lead, rows, columns = tuple(map(int, box.shape[:-2])), int(box.shape[-2]), int(box.shape[-1])
    if not _in_vectors(box, kind, strides):
        return None
    tiles = (*lead, -(-rows // side), -(-columns // side))
    places = list(np.ndindex(*lead[:-1]))
    each = (lead[-1] if lead else 1) * tiles[-2] * tiles[-1]
    scales = [0] * box.dim()
    if scale_axes:
        scales = _strides([tiles[axis] for axis in scale_axes], np.argsort(scale_axes).tolist(), 1)
    parts = []
    for place in places:
        parts.append(
            BoxPart(
                (box[place].data_ptr(), box.stride(-3) if lead else 0, box.stride(-2)),
                sum(at * stride for at, stride in zip(place, strides, strict=False)),
                (strides[-3] if lead else 0, *strides[-2:]),
                SCALE_BYTES * sum(at * stride for at, stride in zip(place, scales, strict=False)),
                (scales[-3] if lead else 0, *scales[-2:], rows, columns, *tiles[-2:]),
            )
        )
    return KernelBox(_kernel(kind), tuple(parts), len(places) * each)


def laying_boxes(kernels: WeightKernels, boxes: Sequence[PlacedBox]) -> list[Callable[[], None]]:
    """Return the launches that lay boxes that `kernel_box` described, for as long as all stays where it is."""
    found: list[Callable[[], None]] = []
    alike: dict[str, list[tuple[BoxPart, int, int, int]]] = defaultdict(list)
    for how, memory, at, scales_at in boxes:
        begin, each = memory.data_ptr(), how.tiles // len(how.parts)
        alike[how.kernel] += [
            (part, begin + at + part.out, begin + scales_at + part.scales, each) for part in how.parts
        ]
    for kernel, parts in alike.items():
        for low in range(0, len(parts), WHOLES):
            reported, first = [], 0
            for part, to, scales_at, tiles in parts[low : low + WHOLES]:
                reported.append(WHOLE.pack(*part.source, to, *part.out_strides, scales_at, *part.shape, first, 0))
                first += tiles
            found.append(kernels.laying(kernel, reported, first))
    return found


def _kernel(kind: MoveKind) -> str:
    if kind.block:
        return f"whole_{kind.dtype}"
    if kind.dtype == kind.to:
        return f"lay_{8 * STORED_AS[kind.to].itemsize}"
    return f"lay_{kind.dtype}_{kind.to}"


def _in_vectors(box: Tensor, kind: MoveKind, strides: Sequence[int]) -> bool:
    """Return whether a kernel can load rows in vectors, and store rows or columns in some; `strides` are bytes."""
    item, to = box.element_size(), STORED_AS[kind.to].itemsize
    rows, columns = int(box.shape[-2]), int(box.shape[-1])
    if not kind.block and min(item, to) == 1:
        return False
    turned = strides[-1] != to
    load = 16 if kind.block else 4 * item
    store = (16 if turned else 8) if kind.block else 4 * to
    numbers = [box.data_ptr(), columns * item, *(stride * item for stride in box.stride()[:-1])]
    apart = [stride for at, stride in enumerate(strides) if at != box.dim() - (2 if turned else 1)]
    return (
        box.stride(-1) == 1
        and not any(number % load for number in numbers)
        and not any(stride % store for stride in apart)
        and (not turned or (strides[-2] == to and rows * to % store == 0))
    )


def _strides(sizes: Sequence[int], axes: Sequence[int], item: int) -> list[int]:
    """Return the strides of contiguous elements in bytes, by the dimensions that `axes` states."""
    found = item * np.concatenate([np.cumprod(np.array(sizes[::-1], np.int64))[::-1][1:], [1]])
    return [int(found[axis]) for axis in axes]
