"""Shards: the parts of the parameters that one trainer holds, registered once, or brought box by box from elsewhere.

Made and released on the event loop's thread; `box` runs on worker threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from asyncfabric import Fabric, Region
from asyncfabric.weights.formats import STORED_AS
from asyncfabric.weights.plan import Plan

Elements = NDArray[Any]
Bring = Callable[[tuple[slice, ...]], Elements]
"""Brings a box of a shard that is not in memory: slices of the shard in, elements out. Called on a worker thread."""

ShardMap = Mapping[str, "Elements | Bring"]
"""By parameter: the rank's shard as `formats.STORED_AS` says, C-contiguous, the same memory in each version."""


class Shards:
    """What one trainer holds, with the dimensions of the plan's pieces."""

    def __init__(self, plan: Plan, rank: int, given: ShardMap) -> None:
        """Check shapes and types.

        Raises ValueError for a shard that is missing, or is not what the plan says.
        """
        self.dims: int = plan.pieces.start.shape[1]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._arrays: dict[str, Elements] = {}
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
        if not isinstance(held, np.ndarray):
            self._bring[name] = (held, len(shape))
            return
        if held.dtype != STORED_AS[dtype] or held.size != int(np.prod(shape)) or not held.flags.c_contiguous:
            raise ValueError(
                f"{name} of rank {rank}: expected C-contiguous {shape} of {STORED_AS[dtype]} ({dtype}), got "
                f"{held.shape} of {held.dtype}{'' if held.flags.c_contiguous else ', not contiguous'}"
            )
        self._arrays[name] = held.reshape(self.shapes[name])

    def box(self, parameter: str, start: tuple[int, ...], size: tuple[int, ...]) -> Elements:
        """Return a box of a shard, counted from the shard's origin: a view, or what was brought."""
        where = tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))
        held = self._arrays.get(parameter)
        if held is not None:
            return held[where]
        bring, own = self._bring[parameter]
        return np.asarray(bring(where[self.dims - own :])).reshape(size)

    def place(self, parameter: str) -> tuple[Region, int] | None:
        """Return the region and the byte in it where a shard begins; None for one that is brought."""
        return self._places.get(parameter)

    async def register(self, fabric: Fabric, regions: list[Region]) -> None:
        """Register the memory of all shards, each piece of memory once, and add it to the caller's list.

        Cancellation: shielded until the engine answered; what was registered is in the list.
        """
        found: dict[int, Region] = {}
        for name, array in self._arrays.items():
            root = _root(array)
            region = found.get(id(root))
            if region is None:
                region = found[id(root)] = await fabric.register(root, access="local")
                regions.append(region)
            self._places[name] = (region, array.ctypes.data - root.ctypes.data)


def _root(array: Elements) -> Elements:
    """Return the array whose memory this one is a part of: shards cut from one buffer are registered once."""
    root = array
    while isinstance(root.base, np.ndarray) and root.base.flags.c_contiguous:
        root = root.base
    return root


@asynccontextmanager
async def open_shards(fabric: Fabric, plan: Plan, rank: int, given: ShardMap) -> AsyncIterator[Shards]:
    """Check and register what a trainer holds; deregistered on leaving.

    Raises:
        ValueError: a shard is missing, or is not what the plan says.
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
