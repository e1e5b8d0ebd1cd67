"""Boxes: parts of memory that lie apart, each written in order to one contiguous place, and summed on the way.

Runs on the event loop's thread, of a fabric of threads on any. A row states where a box lies and where it goes; what of
it is wrong is found here, after the engine refused it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeVar

from asyncfabric._api.checks import checked_imm
from asyncfabric._api.data_ops import _WRITE, _part
from asyncfabric._api.key import RegionKey
from asyncfabric._api.page_ops import PageOps
from asyncfabric._api.region import AnyRegion
from asyncfabric._api.transfer import AnyTransfer, Transfer, TransferT
from asyncfabric.types import BOX_RUN_ALIGN, LEAST_BOX_BYTES, MAX_BOX_DIMENSIONS

if TYPE_CHECKING:
    import numpy as np

    from asyncfabric._bridge.dispatcher import CompletionDispatcher

SOURCE, TARGET, RUN_BYTES, SIZES = 0, 1, 2, 3
"""Columns of a row; from SIZES on as many sizes as strides."""


class AnyBoxTransfer(AnyTransfer):
    """What a transfer of boxes knows beyond others: the checksums."""

    __slots__ = ("_sums",)

    def __init__(self, dispatcher: CompletionDispatcher, what: str, where: object, total: int, count: int) -> None:
        """Not for users."""
        super().__init__(dispatcher, what, where, total)
        self._sums: array[int] = array("Q", bytes(8 * count))  # the engine writes there until the transfer has ended

    @property
    def checksums(self) -> list[int]:
        """XXH3 (64 bits, seed 0) of each box, made of what was read to be written.

        Raises what `result()` raises: the transfer has not ended, or has failed.
        """
        self.result()
        return self._sums.tolist()


BoxTransferT = TypeVar("BoxTransferT", bound=AnyBoxTransfer)


class BoxTransfer(AnyBoxTransfer, Transfer):
    """A transfer of boxes, which knows their checksums when it has ended."""

    __slots__ = ()


class BoxOps(PageOps[TransferT], Generic[TransferT, BoxTransferT]):
    """The data calls with boxes; a part of Fabric."""

    _box_transfer_type: type[BoxTransferT]

    def write_boxes(
        self, source: AnyRegion, boxes: np.ndarray[Any, Any], key: RegionKey, imm: SupportsIndex | None = None
    ) -> BoxTransferT:
        """Write boxes whose bytes lie apart, each in order to one contiguous place, and sum them in the same pass.

        Where `can_gather` is true of one rail of the fabric (`local`), to peers that it reaches, and for memory that
        its owner allocated with `allocate`: there the bytes are read once to be copied and hashed.

        Args:
            source: a whole region.
            boxes: a row of int64 for each: byte of the source where its first run begins; byte behind the key where it
                goes; bytes of a run, a multiple of 64; then for up to 8 dimensions, outermost first, how many steps
                there are from run to run, and then how many bytes each of those steps is. 1 and 0 fill a row up. A box
                has 256 bytes or more. The rows are copied before the call returns.
            key: the right to write.
            imm: counter at the target that gets one arrival per box.

        Returns:
            A transfer whose `checksums` are those of the boxes, once it has ended well.

        Raises:
            TypeError, ValueError: a bad argument; the text names the box.
            TransferError: the rail cannot gather. Awaiting raises it for memory of a target that is not engine-owned.
            StaleKeyError, BusyError, ClosedError: as for `write`.
        """
        region, _, length = _part(source, self._dispatcher)
        if length != region._length:
            raise TypeError(f"boxes are of a whole region, got {source!r}")
        opened = self._reach(key, _WRITE, "write")
        rows, number = checked_boxes(boxes), checked_imm(imm)
        dispatcher, count = self._dispatcher, len(rows)
        about = (f"write of {count} boxes", (source, key), box_bytes(rows), count)
        transfer = self._box_transfer_type(dispatcher, *about)
        if count == 0:
            self._nothing(transfer)
            return transfer
        submit = dispatcher.engine.submit_write_boxes
        try:
            self._submit(transfer, submit, region._id, rows, opened.id, transfer._sums, number)
        except ValueError:
            check_boxes(rows, length, opened.length)
            raise
        return transfer


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
