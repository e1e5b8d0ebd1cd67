"""Shards: the parts of the parameters that one trainer holds, registered once, or brought box by box from elsewhere.

Made and released on the event loop's thread; `box` runs on worker threads. Boxes that lie well are gathered: a rail
copies them from the shard straight to the receiver and sums meanwhile, so they are read once and nothing is staged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from asyncfabric import Fabric, Region
from asyncfabric.types import BOX_RUN_ALIGN, LEAST_BOX_BYTES, MAX_BOX_DIMENSIONS
from asyncfabric.weights.memory.device import HOST, Device, Elements, Memory
from asyncfabric.weights.memory.host import device_of
from asyncfabric.weights.memory.rows import Strided
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor

    from asyncfabric.weights.sender.program import ShardBox


MOST_SAMPLES, MOST_SAMPLED, WORD_BYTES = 1 << 14, 512, 8

Bring = Callable[[tuple[slice, ...]], Elements]
"""Brings a box of a shard that is not in memory: slices of the shard in, elements out. Called on a worker thread."""

ShardMap = Mapping[str, "NDArray[Any] | Tensor | Bring"]
"""By parameter: the rank's shard, C-contiguous, the same memory in each version: an array of numpy as
`formats.STORED_AS` states; or a tensor of torch. All tensors of a rank are in host memory or on one GPU.
"""


class Shards:
    """What one trainer holds, with the dimensions of the plan's pieces."""

    def __init__(self, plan: Plan, rank: int, given: ShardMap) -> None:
        """Check shapes and types.

        Raises:
            ValueError: a shard is missing, is not what the plan states, is elsewhere than the others, or is of no
                parameter of the plan.
            TypeError: a shard is neither an array, nor a tensor, nor a function.
        """
        if unknown := sorted(map(repr, given.keys() - set(plan.parameters))):
            raise ValueError(
                f"rank {rank} was given shards of {len(unknown)} parameters that the plan does not have: "
                f"{', '.join(unknown[:8])}; it has {len(plan.parameters)}, such as "
                f"{', '.join(map(repr, plan.parameters[:4]))}"
            )
        for name, one in given.items():
            check_kind(name, rank, one)
        places = {place_of(held) for held in given.values()} - {None}
        if len(places) > 1:
            raise ValueError(f"shards of rank {rank} are on {sorted(map(str, places))}: give all of them on one device")
        self.device: Device = device_of(places.pop() or HOST if places else HOST)
        self.dims: int = plan.pieces.start.shape[1]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._arrays: dict[str, Elements] = {}  # as the device works on them
        self._views: dict[int, Memory] = {}
        self._bring: dict[str, tuple[Bring, int]] = {}
        self._places: dict[str, tuple[Region, int]] = {}
        for kind_number, parameter_number in sorted(
            set(zip(plan.move_kind.tolist(), plan.move_parameter.tolist(), strict=True))
        ):
            kind, name = plan.kinds[kind_number], plan.parameters[parameter_number]
            placement = plan.sources[kind.source]
            if rank not in placement.ranks:
                continue
            own = tuple(placement.sizes[placement.row_of(rank)].tolist())
            self.shapes[name] = (1,) * (self.dims - len(own)) + own
            self._hold(name, own, kind.dtype, rank, given)

    def _hold(self, name: str, shape: tuple[int, ...], dtype: str, rank: int, given: ShardMap) -> None:
        held = given.get(name)
        if held is None:
            raise ValueError(f"rank {rank} holds a part of {name}, {shape} of {dtype}, but no shard was given")
        if callable(held):
            self._bring[name] = (held, len(shape))
            return
        try:
            self._arrays[name] = self.device.held(held, dtype, shape).reshape(self.shapes[name])
        except ValueError as error:
            raise ValueError(f"{name} of rank {rank}: {error}") from None

    def box(self, parameter: str, start: tuple[int, ...], size: tuple[int, ...]) -> Elements:
        """Return a box of a shard, counted from the shard's origin: a view, or what was brought."""
        where = tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))
        held = self._arrays.get(parameter)
        if held is not None:
            return held[where]
        bring, own = self._bring[parameter]
        return self.device.brought(bring(where[self.dims - own :])).reshape(size)

    def place(self, parameter: str) -> tuple[Region, int] | None:
        """Return the region and the byte in it where a shard begins; None for one that is brought."""
        return self._places.get(parameter)

    async def register(self, fabric: Fabric, regions: list[Region]) -> None:
        """Register the memory of all shards, each piece of memory once, and add it to the caller's list.

        Cancellation: shielded until the engine answered; what was registered is in the list.
        """
        found: dict[tuple[int, int], Region] = {}
        for name, array in self._arrays.items():
            root, begin, at = self.device.root(array)
            region = found.get((begin, root.nbytes))
            if region is None:
                region = found[begin, root.nbytes] = await fabric.register(root, access="local")
                regions.append(region)
                self._views[region.id] = self.device.memory_of(region)
            self._places[name] = (region, at)

    def memory(self, region: Region) -> Memory:
        """Return the bytes of a region that `place` returned."""
        return self._views[region.id]

    def samples(self) -> list[NDArray[np.uint64]]:
        """Return a few cells of the shards in host memory: an optimizer's step changes some of them, as good as surely.

        However large they are it takes a millisecond: about MOST_SAMPLES cells of at most MOST_SAMPLED shards.
        """
        arrays = [held for held in self._arrays.values() if isinstance(held, np.ndarray)]
        arrays = arrays[:: max(1, -(-len(arrays) // MOST_SAMPLED))]
        step = max(1, sum(array.nbytes for array in arrays) // (WORD_BYTES * MOST_SAMPLES))
        found = []
        for array in arrays:
            memory = array.reshape(-1).view(np.uint8)
            found.append(memory[: memory.size // WORD_BYTES * WORD_BYTES].view(np.uint64)[::step].copy())
        return found

    async def settled(self) -> None:
        """Return when what the caller has begun on the shards' device has been done.

        Cancellation: waits for the device; then it goes on.
        """
        wait = self.device.after_caller()
        if wait is not None:
            await in_thread(wait)


def check_kind(name: str, rank: int, held: object) -> None:
    """Raise TypeError for what no shard can be, such as a scalar of numpy, which is no memory that stays."""
    if isinstance(held, np.ndarray) or (callable(held) and not hasattr(held, "dtype")) or hasattr(held, "data_ptr"):
        return
    shape = f" of shape {held.shape}" if isinstance(held, np.generic) else ""
    raise TypeError(
        f"{name} of rank {rank} must be an array of numpy, a tensor of torch or a function that brings boxes, got "
        f"{type(held).__name__}{shape}"
        + ("; give the array it was taken from, or np.asarray(...) with one element" if shape else "")
    )


def place_of(held: object) -> str | None:
    """Return the device of a shard, None for one that is brought."""
    if isinstance(held, np.ndarray):
        return HOST
    where = getattr(held, "device", None)
    return None if where is None else str(where)


@asynccontextmanager
async def open_shards(fabric: Fabric, plan: Plan, rank: int, given: ShardMap) -> AsyncIterator[Shards]:
    """Check and register what a trainer holds; deregistered on leaving.

    Raises:
        ValueError: a shard is missing, or is not what the plan states.
        DeviceError: memory cannot be registered.

    Cancellation: shielded while memory is released; then it goes on.
    """
    shards = Shards(plan, rank, given)
    regions: list[Region] = []
    try:
        await shards.register(fabric, regions)
        yield shards
    finally:
        with anyio.CancelScope(shield=True):
            for region in regions:
                await region.release()


class Gathered(NamedTuple):
    """Boxes of a unit on their way to one receiver.

    Attributes:
        region, receiver: from where, to whom.
        boxes: as `write_boxes` takes them.
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
    """Return the row of a box for `write_boxes`: how it lies, where it begins, where it goes."""
    keep = lies.outer_dimensions(lies.run_bytes)
    fill = MAX_BOX_DIMENSIONS - keep
    sizes, strides = [1] * fill + [*lies.sizes[:keep]], [0] * fill + [*lies.strides[:keep]]
    return [source, target, lies.run_bytes, *sizes, *strides]


def gathered(boxes: Sequence[ShardBox], shards: Shards) -> list[Gathered]:
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
