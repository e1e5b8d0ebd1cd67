"""Device: where the bytes of weights lie, and what converts, puts in order and hashes them there: the host, or a GPU.

Everything else of an update is the same for all of them. Methods that touch bytes are for worker threads. Hosts are in
`host_device` beside this file, GPUs in `cuda`; `devices` finds one by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncfabric import Region
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.rows import Strided
from asyncfabric.weights.memory.tiles import Floats
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.parts import MoveKind

HOST = "cpu"

Memory = Any
"""Bytes, one dimension: an array of numpy in host memory, a tensor of torch in a GPU's."""

Elements = Any
"""Elements as stored, any dimensions: an array, or a tensor of the integers of their width."""


class Stretch(NamedTuple):
    """Bytes that lie somewhere in memory: how, and from which byte on."""

    memory: Memory
    lies: Strided
    at: int


def stretch(memory: Memory, at: int, length_bytes: int) -> Stretch:
    """Return contiguous bytes."""
    return Stretch(memory, _run(length_bytes), at)


@lru_cache(maxsize=4096)
def _run(length_bytes: int) -> Strided:
    return Strided((length_bytes,), (1,), 1)


class Sums(Protocol):
    """Checksums on their way."""

    def add(self, parts: Sequence[Stretch]) -> None:
        """Note one over some stretches, one after the other, which stay as they are from `begin` until `result`.

        In host memory it is worked out at once, while the bytes are in the cache.
        """
        ...

    def begin(self) -> None:
        """Begin what was added; `result` does where nobody did."""
        ...

    def ready(self) -> bool:
        """Return whether `result` would not wait."""
        ...

    def result(self) -> list[int]:
        """Return all of them, in order, once they have been worked out; on any thread."""
        ...


Summing = Callable[[Sequence[int]], Sums]
"""Returns checksums by their numbers; they are begun by `begin`, if not before."""


def added(sums: Sums, stretches: Sequence[Sequence[Stretch]], numbers: Sequence[int]) -> Sums:
    """Return sums to which some of many were added."""
    for number in numbers:
        sums.add(stretches[number])
    return sums


class Measured(NamedTuple):
    """A shard whose blocks are measured: its elements, where it begins in the parameter, its types."""

    elements: Elements
    start: Ints
    kind: MoveKind


class PlacedBox(NamedTuple):
    """A box that a device has a description of: how it lays it, and where in a memory it and its scales begin."""

    how: Any
    memory: Memory
    at: int
    scales_at: int


class Root(NamedTuple):
    """The memory that an array or a tensor is a part of.

    Attributes:
        memory: all of it, to be registered once for all that is cut from it.
        address: where it begins.
        at: the byte of it at which the part begins.
    """

    memory: Any
    address: int
    at: int


class Device(Protocol):
    """What an update needs of a place for bytes.

    Attributes:
        name: "cpu" or "cuda:N", as fabrics allocate.
        checksum: the kind that it does quickest; it can do all.
        fills: units that are converted at once.
        checks: batches of rows that are hashed at once.
        measures: shards that are measured at once.
        queues: what is begun goes on by itself, and writes wait for it on the device: no thread has to.
    """

    name: str
    checksum: ChecksumKind
    fills: int
    checks: int
    measures: int
    queues: bool

    @property
    def unit_bytes(self) -> int:
        """Boxes go through the pipeline together up to about this."""
        ...

    @property
    def first_unit_bytes(self) -> int | None:
        """The first ones up to this, so that the wire has something to do soon, each twice of the last; None: all."""
        ...

    @property
    def last_unit_bytes(self) -> int | None:
        """Each up to half of what is left, down to this: receivers have little to check in the end then; None: no."""
        ...

    def memory_of(self, region: Region) -> Memory:
        """Return the bytes of a region of this device."""
        ...

    def address(self, memory: Memory) -> int:
        """Return where memory begins."""
        ...

    def window(self, address: int, length_bytes: int) -> Memory:
        """Return memory by its address, which stays as long as it is used; what is not there is not to be touched."""
        ...

    def held(self, given: Any, dtype: str, shape: tuple[int, ...]) -> Elements:
        """Return a shard as its elements are stored, over its own memory.

        Raises ValueError for another type or size, and for one that is not C-contiguous.
        """
        ...

    def brought(self, given: Any) -> Elements:
        """Return on this device, as they are stored, elements that were brought."""
        ...

    def root(self, elements: Elements) -> Root:
        """Return the memory that a shard is a part of."""
        ...

    def after_caller(self) -> Callable[[], None] | None:
        """Return what waits, on any thread, for what the calling thread has begun on the device; None for nothing."""
        ...

    def measure(self, shards: Sequence[Measured]) -> list[Floats]:
        """Return the maxima of blocks of some shards, in host memory; as `tiles.measure`."""
        ...

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
        """Cast, quantise or put in order a box, into contiguous memory.

        `out` has exactly the bytes, `sizes` states how the elements lie in it, and `axes` which of those the dimensions
        of the box are. The others are as in `tiles.convert_into`.
        """
        ...

    def described(
        self, box: Elements, kind: MoveKind, sizes: Sequence[int], axes: Sequence[int], scale_axes: Sequence[int]
    ) -> Any:
        """Return how it lays a box, many of them at once and without maxima; None if it cannot.

        A box that is quantised holds all of its blocks. `sizes` and `axes` are as in `convert`; the scales lie in the
        order of `scale_axes`, outermost first.
        """
        ...

    def laying(self, boxes: Sequence[PlacedBox]) -> Callable[[], None]:
        """Return what does as `convert` does, each time, for boxes that `described` returned.

        It writes their scales too, as `scales_of`. Everything stays where it is as long as that is used.
        """
        ...

    def put(self, out: Memory, data: np.ndarray) -> None:
        """Copy bytes of the host."""
        ...

    def gather(self, out: Memory, part: Stretch) -> None:
        """Put a stretch in order, into contiguous memory."""
        ...

    def sums(self, kind: ChecksumKind) -> Sums:
        """Return what works out checksums."""
        ...

    def summing(self, kind: ChecksumKind, stretches: Sequence[Sequence[Stretch]]) -> Summing:
        """Return what works out some of these checksums, by their numbers, each time that it is asked.

        Each is over some stretches, as in `Sums.add`, which stay where they are as long as it is used.
        """
        ...

    def working(self) -> AbstractContextManager[None]:
        """Return what a thread holds while it begins many things: each of them costs less then."""
        ...

    def after(self) -> object:
        """Return what a write waits for, so that what this thread began is done before; None for nothing."""
        ...

    def mark(self) -> Any:
        """Return a moment: when what this thread began so far is done."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two moments that have passed."""
        ...

    def finish(self) -> None:
        """Return when everything that this thread began has been done."""
        ...
