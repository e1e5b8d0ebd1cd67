"""Gathering: boxes that a rail copies from the shard straight to the receiver and sums meanwhile: nothing is staged.

Pure but for looking at where shards lie. A box is read once, to be copied and hashed, instead of up to three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfabric import Fabric, Region
from asyncfabric.types import BOX_RUN_ALIGN, LEAST_BOX_BYTES, MAX_BOX_DIMENSIONS
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.update.device import HOST, Device
from asyncfabric.weights.update.rows import Strided
from asyncfabric.weights.update.shards import Shards

if TYPE_CHECKING:
    from asyncfabric.weights.update.program import Box


class Gathered(NamedTuple):
    """Boxes of a unit on their way to one receiver.

    Attributes:
        region, receiver: from where, to whom.
        boxes: as `Fabric.write_boxes` takes them.
        numbers: of the boxes in the unit.
    """

    region: Region
    receiver: str
    boxes: Ints
    numbers: tuple[int, ...]


def gathers(fabric: Fabric, device: Device) -> bool:
    """Return whether boxes of a device are gathered."""
    rails = fabric.rails
    return device.name == HOST and len(rails) == 1 and rails[0].can_gather


def is_gathered(lies: Strided, written_run_bytes: int) -> bool:
    """Return whether a box can be: it lies in a shard in runs of whole stripes, and is one write."""
    return (
        lies.run_bytes % BOX_RUN_ALIGN == 0
        and lies.nbytes >= LEAST_BOX_BYTES
        and lies.outer_dimensions(lies.run_bytes) <= MAX_BOX_DIMENSIONS
        and written_run_bytes == lies.nbytes
    )


def row_of(lies: Strided, source: int, target: int) -> list[int]:
    """Return the row of a box for `Fabric.write_boxes`: how it lies, where it begins, where it goes."""
    keep = lies.outer_dimensions(lies.run_bytes)
    fill = MAX_BOX_DIMENSIONS - keep
    sizes, strides = [1] * fill + [*lies.sizes[:keep]], [0] * fill + [*lies.strides[:keep]]
    return [source, target, lies.run_bytes, *sizes, *strides]


def gathered(boxes: Sequence[Box], shards: Shards) -> list[Gathered]:
    """Return what is gathered of some boxes, by region and receiver."""
    found: dict[tuple[int, str], tuple[Region, list[list[int]], list[int]]] = {}
    for number, box in enumerate(boxes):
        if not box.gathered:
            continue
        assert box.direct is not None
        region, base = box.source(shards)
        for row in box.rows:
            _, rows, numbers = found.setdefault((region.id, row.receiver), (region, [], []))
            rows.append(row_of(box.direct, base, row.weights_at))
            numbers.append(number)
    return [
        Gathered(region, receiver, np.array(rows, np.int64), tuple(numbers))
        for (_, receiver), (region, rows, numbers) in found.items()
    ]
