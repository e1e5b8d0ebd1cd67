"""HostDevice: weights in host memory, with numpy, and the compiled passes that order and hash them; devices by name.

`device_of` imports what is for GPUs when the first of them is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate
from math import prod
from time import monotonic
from typing import Any

import numpy as np

from asyncfabric import Region
from asyncfabric._kernels.native import native_box_sums
from asyncfabric._kernels.ordering import LEAST_SUMMED_BYTES
from asyncfabric.weights.memory.checksums import ChecksumKind, checksum
from asyncfabric.weights.memory.device import (
    HOST,
    Device,
    Elements,
    Measured,
    Memory,
    PlacedBox,
    Root,
    Stretch,
    Summing,
    Sums,
    added,
)
from asyncfabric.weights.memory.rows import MOST_DIMENSIONS, Bytes, Strided, order_and_sum
from asyncfabric.weights.memory.tiles import Floats, convert_into, measure
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import STORED_AS
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.threads import ways

Box = Sequence[tuple[Strided, int]]
"""How its stretches lie, one after the other, and from which byte of a memory on."""

LEAST_RUN_BYTES = 64
"""Shorter runs go through the compiled call one by one: numpy puts them in order quicker."""

_make = cache(native_box_sums)


class BoxTable:
    """Boxes of one memory."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        """Take the boxes; where nothing was compiled, and for those that the compiled call does not take, is Python."""
        make = _make()
        known = [number for number, box in enumerate(boxes) if make is not None and _taken(box)]
        self._others = {number: boxes[number] for number in set(range(len(boxes))).difference(known)}
        self._place = np.full(len(boxes), -1, np.int64)
        self._place[known] = np.arange(len(known))
        if make is None:
            return
        stretches = [one for number in known for one in boxes[number]]
        outer = [lies.outer_dimensions(lies.run_bytes) for lies, _ in stretches]
        self._sums = make(
            _begins(len(boxes[number]) for number in known),
            np.array([at for _, at in stretches], np.int64),
            np.array([lies.run_bytes for lies, _ in stretches], np.int64),
            _begins(outer),
            np.array(
                [size for (lies, _), keep in zip(stretches, outer, strict=True) for size in lies.sizes[:keep]], np.int64
            ),
            np.array(
                [step for (lies, _), keep in zip(stretches, outer, strict=True) for step in lies.strides[:keep]],
                np.int64,
            ),
        )

    def sums(self, memory: Bytes, numbers: Sequence[int]) -> list[int]:
        """Return the XXH3 (64 bits) of some of the boxes.

        Raises IndexError when a box leaves the memory.
        """
        wanted = np.asarray(numbers, np.int64)
        places = self._place[wanted]
        inside = places >= 0
        found = np.zeros(len(wanted), np.uint64)
        if inside.any():
            compiled = np.empty(int(inside.sum()), np.uint64)
            self._sums.sum(memory, places[inside], compiled)
            found[inside] = compiled
        for index in np.flatnonzero(~inside).tolist():
            box = self._others[int(wanted[index])]
            found[index] = checksum(part for lies, at in box for part in lies.parts(memory, at))
        return found.tolist()


def _taken(box: Box) -> bool:
    return sum(lies.nbytes for lies, _ in box) >= LEAST_SUMMED_BYTES and all(
        lies.run_bytes >= LEAST_RUN_BYTES and lies.outer_dimensions(lies.run_bytes) <= MOST_DIMENSIONS
        for lies, _ in box
    )


def _begins(counts: Iterable[int]) -> np.ndarray:
    return np.array([0, *accumulate(counts)], np.int64)


HOST_UNIT_BYTES, LEAST_UNIT_BYTES = 64 << 20, 16 << 20
"""Boxes go through the pipeline together up to about this many bytes, shared out to the threads that fill units.
Each costs the event loops of both ends milliseconds, so few cores want them large; many would wait for the first."""

HOST_EDGE_UNIT_BYTES = 4 << 20

CHECKS = 4
"""Batches that a receiver hashes at once where there are cores for it: it has nothing else to do, and what is left when
the last bytes have come is what everybody waits for."""


class HostSums:
    """Checksums in host memory, worked out as they are added."""

    def __init__(self, kind: ChecksumKind, found: Sequence[int] = ()) -> None:
        self._kind: ChecksumKind = kind
        self._found: list[int] = list(found)

    def add(self, parts: Sequence[Stretch]) -> None:
        """Work one out."""
        if self._kind == "words":
            self._found.append(checksum((lies.gathered(memory, at) for memory, lies, at in parts), "words"))
        else:
            self._found.append(checksum(piece for memory, lies, at in parts for piece in lies.parts(memory, at)))

    def order(self, out: Memory, part: Stretch, past: bool) -> bool:
        """Put a stretch in order, into contiguous memory, and work out its checksum meanwhile, if that is possible."""
        found = order_and_sum(part.lies, part.memory, part.at, out, past) if self._kind == "xxh3" else None
        if found is not None:
            self._found.append(found)
        return found is not None

    def leave(self) -> bool:
        """Leave the next one to a rail, if it is of the kind that rails work out; `take` brings it."""
        if self._kind == "xxh3":
            self._found.append(0)
        return self._kind == "xxh3"

    def take(self, numbers: Sequence[int], found: Sequence[int]) -> None:
        """Take some that were left."""
        for number, one in zip(numbers, found, strict=True):
            self._found[number] = one

    def begin(self) -> None:
        """They are worked out already."""

    def ready(self) -> bool:
        """They are."""
        return True

    def result(self) -> list[int]:
        """Return them."""
        return self._found


class HostDevice:
    """Host memory, with numpy."""

    name: str = HOST
    checksum: ChecksumKind = "xxh3"
    measures: int = 1
    queues: bool = False

    def __init__(self) -> None:
        """Have as many threads for units and for batches as the cores of this process are good for."""
        self.fills: int = ways()
        self.checks: int = CHECKS if self.fills > 1 else 1

    @property
    def unit_bytes(self) -> int:
        """Boxes go through the pipeline together up to about this."""
        return max(HOST_UNIT_BYTES // self.fills, LEAST_UNIT_BYTES)

    @property
    def first_unit_bytes(self) -> int | None:
        """The first ones, where cores are there to fill them: small. Few cores are busy with anything."""
        return HOST_EDGE_UNIT_BYTES if self.fills > 1 else None

    @property
    def last_unit_bytes(self) -> int | None:
        """The last ones as small, there."""
        return self.first_unit_bytes

    def memory_of(self, region: Region) -> Memory:
        """Return the bytes of a region."""
        return np.frombuffer(region.memory, np.uint8)

    def address(self, memory: Memory) -> int:
        """Return where an array begins."""
        return int(memory.ctypes.data)

    def window(self, address: int, length_bytes: int) -> Memory:
        """Return an array over memory by its address."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))

    def held(self, given: Any, dtype: str, shape: tuple[int, ...]) -> Elements:
        """Return an array as it is, and one over the memory of a tensor."""
        if not isinstance(given, np.ndarray):
            from asyncfabric.weights.tensors import stored

            given = stored(given)
        if given.dtype != STORED_AS[dtype] or given.size != prod(shape) or not given.flags.c_contiguous:
            raise ValueError(
                f"expected C-contiguous {shape} of {STORED_AS[dtype]} ({dtype}), got "
                f"{given.shape} of {given.dtype}{'' if given.flags.c_contiguous else ', not contiguous'}"
            )
        return given

    def brought(self, given: Any) -> Elements:
        """Return an array."""
        return np.asarray(given)

    def root(self, elements: Elements) -> Root:
        """Return the array whose memory this one is a part of."""
        root = elements
        while isinstance(root.base, np.ndarray) and root.base.flags.c_contiguous:
            root = root.base
        return Root(root, root.ctypes.data, elements.ctypes.data - root.ctypes.data)

    def after_caller(self) -> Callable[[], None] | None:
        """Nothing is ever under way."""
        return None

    def measure(self, shards: Sequence[Measured]) -> list[Floats]:
        """Return the maxima of blocks."""
        return [measure(*one) for one in shards]

    def convert(
        self,
        out: Memory,
        sizes: Sequence[int],
        axes: Sequence[int],
        box: Elements,
        kind: MoveKind,
        maxima: Floats | None,
        start: Ints,
        origin: Ints,
    ) -> None:
        """Convert tile by tile."""
        target = out.view(STORED_AS[kind.to]).reshape(sizes).transpose(axes)
        convert_into(target, box, kind, maxima, start, origin)

    def described(
        self, box: Elements, kind: MoveKind, sizes: Sequence[int], axes: Sequence[int], scale_axes: Sequence[int]
    ) -> Any:
        """There is nothing to win: boxes are converted one by one, and maxima are measured by other threads."""
        return None

    def laying(self, boxes: Sequence[PlacedBox]) -> Callable[[], None]:
        """Nobody asks for it."""
        raise NotImplementedError("boxes in host memory are converted one by one")

    def put(self, out: Memory, data: np.ndarray) -> None:
        """Copy bytes."""
        out[...] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def gather(self, out: Memory, part: Stretch) -> None:
        """Put a stretch in order."""
        out[...] = part.lies.gathered(part.memory, part.at)

    def sums(self, kind: ChecksumKind) -> Sums:
        """Return what works out checksums."""
        return HostSums(kind)

    def summing(self, kind: ChecksumKind, stretches: Sequence[Sequence[Stretch]]) -> Summing:
        """Return what works out XXH3 of one memory in one compiled call, everything else one by one."""
        memory: Memory = stretches[0][0].memory if stretches else None
        if kind != "xxh3" or any(part.memory is not memory for parts in stretches for part in parts):
            return lambda numbers: added(HostSums(kind), stretches, numbers)
        table = BoxTable([[(lies, at) for _, lies, at in parts] for parts in stretches])
        return lambda numbers: HostSums(kind, table.sums(memory, numbers))

    def working(self) -> AbstractContextManager[None]:
        """Return nothing to hold."""
        return nullcontext()

    def after(self) -> object:
        """Nothing is ever under way."""
        return None

    def mark(self) -> float:
        """Return the time."""
        return monotonic()

    def seconds(self, first: float, second: float) -> float:
        """Return what lies between two times."""
        return second - first

    def finish(self) -> None:
        """Nothing is ever under way."""


def device_of(name: str) -> Device:
    """Return the device of a name.

    Raises:
        ValueError: it is none that weights can be on.
        ImportError: a GPU's without torch.
    """
    if name == HOST:
        return HostDevice()
    if not name.startswith("cuda"):
        raise ValueError(f"weights are on 'cpu' or 'cuda:N', got {name!r}")
    from asyncfabric.weights.memory.gpu.device import TorchDevice

    return TorchDevice(name)
