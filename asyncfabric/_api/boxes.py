"""Boxes: parts of memory that lie apart, each written in order to one contiguous place, and summed on the way.

Runs on the event loop's thread, of a fabric of threads on any. For weights: not a call of
`Fabric`. A row states where a box lies and where it goes; what of it is wrong is found here, after a refusal.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, SupportsIndex

from asyncfabric._api.checks import checked_imm
from asyncfabric._api.data_ops import _WRITE, _part
from asyncfabric._api.key import RegionKey
from asyncfabric._api.region import AnyRegion
from asyncfabric._api.transfer import TransferT
from asyncfabric.types import BOX_RUN_ALIGN, LEAST_BOX_BYTES, MAX_BOX_DIMENSIONS

if TYPE_CHECKING:
    import numpy as np

    from asyncfabric._api.any_fabric import AnyFabric

SOURCE, TARGET, RUN_BYTES, SIZES = 0, 1, 2, 3
"""Columns of a row; from SIZES on as many sizes as strides."""


class GatheredSums:
    """XXH3 (64 bits, seed 0) of each box, made of what was read to be written; right once their transfer ended well."""

    __slots__ = ("_numbers",)

    def __init__(self, count: int) -> None:
        self._numbers: array[int] = array("Q", bytes(8 * count))  # the engine writes there until the transfer has ended

    def __repr__(self) -> str:
        return f"<sums of {len(self._numbers)} boxes>"

    def tolist(self) -> list[int]:
        """Return them in the order of the boxes."""
        return self._numbers.tolist()


def write_boxes(
    fabric: AnyFabric[TransferT],
    source: AnyRegion,
    boxes: np.ndarray[Any, Any],
    key: RegionKey,
    imm: SupportsIndex | None = None,
) -> tuple[TransferT, GatheredSums]:
    """Write boxes whose bytes lie apart, each in order to one contiguous place, and sum them in the same pass.

    Where `can_gather` is true of one rail of the fabric (`local`), to peers that it reaches, and for memory that
    its owner allocated with `allocate`: there the bytes are read once to be copied and hashed.

    Args:
        fabric: which writes; its transfers are awaited or waited for as its others are.
        source: a whole region.
        boxes: a row of int64 for each: byte of the source where its first run begins; byte behind the key where it
            goes; bytes of a run, a multiple of 64; then for up to 8 dimensions, outermost first, how many steps
            there are from run to run, and then how many bytes each of those steps is. 1 and 0 fill a row up. A box
            has 256 bytes or more. The rows are copied before the call returns.
        key: the right to write.
        imm: counter at the target that gets one arrival per box.

    Raises:
        TypeError, ValueError: a bad argument; the text names the box.
        TransferError: the rail cannot gather. Awaiting raises it for memory of a target that is not engine-owned.
        StaleKeyError, BusyError, ClosedError: as for `Fabric.write`.
    """
    dispatcher = fabric._dispatcher
    region, _, length = _part(source, dispatcher)
    if length != region._length:
        raise TypeError(f"boxes are of a whole region, got {source!r}")
    opened = fabric._reach(key, _WRITE, "write")
    rows, number = checked_boxes(boxes), checked_imm(imm)
    sums = GatheredSums(len(rows))
    about = (f"write of {len(rows)} boxes", (source, key, sums), box_bytes(rows))
    transfer = fabric._transfer_type(dispatcher, *about)
    if not len(rows):
        return fabric._nothing(transfer), sums
    submit = dispatcher.engine.submit_write_boxes
    try:
        fabric._submit(transfer, submit, region._id, rows, opened.id, sums._numbers, number)
    except ValueError:
        check_boxes(rows, length, opened.length)
        raise
    return transfer, sums


def box_bytes(boxes: np.ndarray[Any, Any]) -> int:
    """Return the bytes of all boxes; a number without meaning when one of them is malformed."""
    dimensions = (boxes.shape[1] - SIZES) // 2
    return int(boxes[:, [RUN_BYTES, *range(SIZES, SIZES + dimensions)]].prod(axis=1).sum())


def checked_boxes(boxes: Any) -> Any:
    """Return boxes as the engine takes them. Raises TypeError or ValueError for other shapes and types."""
    if getattr(getattr(boxes, "dtype", None), "kind", "") != "i" or boxes.dtype.itemsize != 8 or boxes.ndim != 2:
        raise TypeError("boxes must be a numpy array of int64 with a row for each box")
    columns = boxes.shape[1]
    if columns < SIZES or columns % 2 == 0 or columns > SIZES + 2 * MAX_BOX_DIMENSIONS:
        raise ValueError(
            f"a row of boxes is source, target, run_bytes, then up to {MAX_BOX_DIMENSIONS} sizes and as many strides; "
            f"these have {columns} columns"
        )
    return boxes if boxes.flags.c_contiguous else boxes.copy()


def check_boxes(boxes: Any, source_bytes: int, target_bytes: int) -> None:
    """Raise ValueError naming the first box that cannot be written; for the reason why the engine refused it."""
    dimensions = (boxes.shape[1] - SIZES) // 2
    for position, row in enumerate(boxes.tolist()):
        source, target, run = row[:SIZES]
        sizes, strides = row[SIZES : SIZES + dimensions], row[SIZES + dimensions :]
        nbytes, reach = run, run
        for size, stride in zip(sizes, strides, strict=True):
            nbytes, reach = nbytes * size, reach + (size - 1) * stride
        if run <= 0 or run % BOX_RUN_ALIGN or min(sizes, default=1) < 1 or min(strides, default=0) < 0:
            raise ValueError(
                f"boxes[{position}] = {row}: runs are multiples of {BOX_RUN_ALIGN} bytes, sizes at least 1, "
                "strides not negative"
            )
        if nbytes < LEAST_BOX_BYTES:
            raise ValueError(f"boxes[{position}] has {nbytes} bytes; a box has {LEAST_BOX_BYTES} or more")
        if source < 0 or source + reach > source_bytes:
            raise ValueError(f"boxes[{position}] leaves the source: bytes {source}..{source + reach} of {source_bytes}")
        if target < 0 or target + nbytes > target_bytes:
            raise ValueError(f"boxes[{position}] leaves the key: bytes {target}..{target + nbytes} of {target_bytes}")
