"""Plans: pairs of blocks become a few calls of the fabric, page lists and single writes or reads.

Pure but for submit(); any thread. Pages are named by their byte offsets (a stride of 1), so any block of one
length between the same two registrations goes into one list. Blocks of many lengths are cut into powers of two.
Of prepared lists whose blocks are all alike, which most are, a compiled pass picks the pages.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from asyncfabric import RegionKey, RegionSlice, blocking
from asyncfabric._kernels.native import native_picking
from asyncfabric._kernels.picking import JOINED, PAGES
from asyncfabric.integrations.nixl.blocks import Column
from asyncfabric.integrations.nixl.errors import nixlInvalidParamError
from asyncfabric.integrations.nixl.kinds import nixl_xfer_op_t
from asyncfabric.integrations.nixl.ranges import Found

MOST_LENGTHS = 16
"""With more distinct lengths than this blocks are cut into powers of two, of which there are few."""

_WRITE = nixl_xfer_op_t.NIXL_WRITE


class Step(NamedTuple):
    """One call of the fabric, a single write or read: `part` to or from `offset` behind the key."""

    writes: bool
    part: RegionSlice
    key: RegionKey
    offset: int

    @property
    def total_bytes(self) -> int:
        """Bytes that it moves."""
        return self.part.length

    @property
    def worth(self) -> int:
        """What it adds to the counter of an imm."""
        return 1

    @property
    def on_gpu(self) -> bool:
        """Whether its own end is memory of a GPU."""
        return self.part.region.device != "cpu"

    def submit(self, fabric: blocking.Fabric, imm: int | None = None) -> blocking.Transfer:
        """Submit it, a write with an imm if there is one; raises as the calls of the fabric do."""
        if self.writes:
            return fabric.write(self.part, self.key, self.offset, imm)
        return fabric.read(self.key, self.offset, self.part)


class PageStep(NamedTuple):
    """One call of the fabric with page lists: pieces of `page_bytes` at columns of offsets."""

    writes: bool
    region: blocking.Region
    key: RegionKey
    page_bytes: int
    local: Column
    remote: Column

    @property
    def total_bytes(self) -> int:
        """Bytes that it moves."""
        return self.page_bytes * len(self.local)

    @property
    def worth(self) -> int:
        """What it adds to the counter of an imm."""
        return len(self.local)

    @property
    def on_gpu(self) -> bool:
        """Whether its own end is memory of a GPU."""
        return self.region.device != "cpu"

    def submit(self, fabric: blocking.Fabric, imm: int | None = None) -> blocking.Transfer:
        """Submit it, a write with an imm if there is one; raises as the calls of the fabric do."""
        local, remote, size = self.local, self.remote, self.page_bytes
        if self.writes:
            return fabric.write_pages(
                self.region, local, self.key, remote, page_bytes=size, source_stride=1, target_stride=1, imm=imm
            )
        return fabric.read_pages(
            self.key, remote, self.region, local, page_bytes=size, source_stride=1, target_stride=1
        )


AnyStep = Step | PageStep


class Side(NamedTuple):
    """One side of a transfer: where its blocks are, and how long they are."""

    owners: tuple[object, ...]
    which: Column
    offsets: Column
    lengths: Column

    @classmethod
    def of(cls, found: Found[object], lengths: Column) -> Side:
        """Return blocks that were found in their registrations."""
        return cls(found.owners, found.which, found.offsets, lengths)

    def pick(self, indices: Column) -> Side:
        """Return the blocks at these positions."""
        which = self.which if len(self.owners) == 1 else self.which[indices]
        return Side(self.owners, which, self.offsets[indices], self.lengths[indices])


class AlikeBlocks(NamedTuple):
    """One side whose blocks have one length and lie in one registration."""

    owner: Any
    page_bytes: int
    offsets: Column

    @classmethod
    def of(cls, side: Side) -> AlikeBlocks | None:
        """Return these blocks if they are alike, and not empty."""
        lengths = side.lengths
        if len(side.owners) != 1 or not len(lengths) or not lengths[0] or not bool((lengths == lengths[0]).all()):
            return None
        return cls(side.owners[0], int(lengths[0]), np.ascontiguousarray(side.offsets))


def pick(
    operation: nixl_xfer_op_t, local: AlikeBlocks, remote: AlikeBlocks, first: Any, second: Any
) -> tuple[AnyStep, ...] | None:
    """Return the calls for the blocks at these positions of two lists of blocks that are alike.

    None where a compiled pass cannot: nothing is compiled, the lists differ, or positions are bad or of a rare form.
    """
    loops = _picking()
    if loops is None or local.page_bytes != remote.page_bytes or not hasattr(first, "__len__") or not len(first):
        return None
    size, chosen = local.page_bytes, np.empty((2, len(first)), np.int64)
    form = loops.pick_pairs(first, local.offsets, second, remote.offsets, size, chosen)
    writes = operation is _WRITE
    if form == PAGES:
        return (PageStep(writes, local.owner, remote.owner, size, chosen[0], chosen[1]),)
    if form == JOINED:
        begin = int(chosen[0, 0])
        return (Step(writes, local.owner[begin : begin + size * len(first)], remote.owner, int(chosen[1, 0])),)
    return None


_picking = cache(native_picking)


def plan(operation: nixl_xfer_op_t, local: Side, remote: Side) -> tuple[AnyStep, ...]:
    """Return the calls that move each local block to or from the remote one of the same position; none for empty ones.

    Raises:
        nixlInvalidParamError: the sides have other numbers of blocks, or two blocks have other lengths.
    """
    count = len(local.offsets)
    if count != len(remote.offsets):
        raise nixlInvalidParamError(f"{count} local descriptors, but {len(remote.offsets)} remote ones")
    lengths = local.lengths
    if not np.array_equal(lengths, remote.lengths):
        position = int(np.flatnonzero(lengths != remote.lengths)[0])
        raise nixlInvalidParamError(
            f"descriptor {position} has {int(lengths[position])} bytes locally and {int(remote.lengths[position])} "
            "remotely"
        )
    if not lengths.all():
        rows = np.flatnonzero(lengths)
        local, remote, lengths, count = local.pick(rows), remote.pick(rows), lengths[rows], len(rows)
    if not count:
        return ()
    writes = operation == _WRITE
    if len(local.owners) == 1 and len(remote.owners) == 1 and (count == 1 or bool((lengths == lengths[0]).all())):
        pair = (local.owners[0], remote.owners[0])
        return _list(writes, pair, int(lengths[0]), local.offsets, remote.offsets)
    return tuple(_groups(writes, local, remote))


def _groups(writes: bool, local: Side, remote: Side) -> list[AnyStep]:
    count = len(local.offsets)
    first = local.which if len(local.owners) > 1 else np.zeros(count, dtype=np.int64)
    second = remote.which if len(remote.owners) > 1 else np.zeros(count, dtype=np.int64)
    pairs = first * len(remote.owners) + second
    sources, targets, lengths = local.offsets, remote.offsets, local.lengths
    sizes, kinds = np.unique(lengths, return_inverse=True)
    if len(sizes) > MOST_LENGTHS:
        pairs, sources, targets, lengths = _powers_of_two(pairs, sources, targets, lengths)
        sizes, kinds = np.unique(lengths, return_inverse=True)
    keys = pairs * len(sizes) + kinds
    order = np.argsort(keys, kind="stable")  # one pass where blocks come region by region, as those of layers do
    keys = keys[order]
    bounds = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    steps: list[AnyStep] = []
    for begin, end in pairwise(bounds):
        pair, kind = divmod(int(keys[begin]), len(sizes))
        rows = order[begin:end]
        owners = (local.owners[pair // len(remote.owners)], remote.owners[pair % len(remote.owners)])
        steps.extend(_list(writes, owners, int(sizes[kind]), sources[rows], targets[rows]))
    return steps


def _list(writes: bool, owners: tuple[object, object], size: int, local: Column, remote: Column) -> tuple[AnyStep, ...]:
    """Return the call for blocks of one length between two registrations; one piece where they join on both sides."""
    region, key = owners
    assert isinstance(region, blocking.Region) and isinstance(key, RegionKey)
    if len(local) > 1 and not (bool((np.diff(local) == size).all()) and bool((np.diff(remote) == size).all())):
        pages = (np.ascontiguousarray(local), np.ascontiguousarray(remote))
        return (PageStep(writes, region, key, size, *pages),)
    begin = int(local[0])
    return (Step(writes, region[begin : begin + size * len(local)], key, int(remote[0])),)


def _powers_of_two(pairs: Column, sources: Column, targets: Column, lengths: Column) -> tuple[Column, ...]:
    """Cut blocks into pieces whose lengths are the bits of theirs."""
    rows, parts, begins = [], [], []
    done = np.zeros_like(lengths)
    for bit in range(int(lengths.max()).bit_length() - 1, -1, -1):
        members = np.flatnonzero(lengths >> bit & 1)
        rows.append(members)
        parts.append(np.full(len(members), 1 << bit, dtype=np.int64))
        begins.append(done[members])
        done[members] += 1 << bit
    row, begin = np.concatenate(rows), np.concatenate(begins)
    return pairs[row], sources[row] + begin, targets[row] + begin, np.concatenate(parts)
