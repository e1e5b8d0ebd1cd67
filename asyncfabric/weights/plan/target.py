"""Where the boxes of one parameter land in a replica: in which tensor, at which place of it, in which order of axes.

Pure values. Fusing (QKV, gate and up), stacking experts and transposing are all the same statement: a box of the source
parameter begins at an origin of the local tensor, and each of its dimensions goes to some dimension of that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import ITEM_BYTES, check_conversion
from asyncfabric.weights.plan.placement import Placement


@dataclass(frozen=True, eq=False)
class Target:
    """The boxes of one parameter that the ranks of one replica want. Arrays must not be changed.

    Attributes:
        placement: which rank wants which box, in coordinates of the source parameter; ranks count within the replica.
        axes: for each dimension of the parameter the dimension of the local tensor that it becomes.
        origins: int64 (boxes, dimensions of the local tensor): where the box begins in it.
        local_shapes: int64, the same shape: the rank's whole local tensor.
    """

    placement: Placement
    axes: tuple[int, ...]
    origins: Ints
    local_shapes: Ints

    def __post_init__(self) -> None:
        dims = self.origins.shape[1]
        if self.origins.shape != self.local_shapes.shape or len(self.origins) != len(self.placement.ranks):
            raise ValueError("a target needs one origin and one local shape for each box")
        if len(self.axes) != len(self.placement.shape) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes must name a distinct dimension for each of the parameter's, got {self.axes}")
        if any(not 0 <= axis < dims for axis in self.axes):
            raise ValueError(f"axes must be in 0..{dims - 1}, got {self.axes}")
        extent = self.extents
        bad = ((self.origins < 0) | (self.origins + extent > self.local_shapes)).any(axis=1)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(
                f"rank {self.placement.ranks[at]}: a box of {extent[at].tolist()} at {self.origins[at].tolist()} "
                f"leaves the local tensor of shape {self.local_shapes[at].tolist()}"
            )

    @property
    def extents(self) -> Ints:
        """Sizes of the boxes in dimensions of the local tensor; 1 where the parameter has no such dimension."""
        extent = np.ones_like(self.origins)
        extent[:, list(self.axes)] = self.placement.sizes
        return extent

    @cached_property
    def digest(self) -> bytes:
        """A stable hash of the content."""
        content = blake2b(self.placement.digest + repr(self.axes).encode(), digest_size=16)
        for column in (self.origins, self.local_shapes):
            content.update(repr(column.shape).encode())
            content.update(np.ascontiguousarray(column, "<i8").tobytes())
        return content.digest()


@dataclass(frozen=True, slots=True)
class Move:
    """One parameter of the trainer on its way into one tensor of a replica. A parameter may have several.

    Attributes:
        parameter: name at the trainer.
        dtype: element type at the trainer, a key of ITEM_BYTES.
        source: which trainer rank holds which box.
        region: name of the replica's tensor.
        to: element type there.
        target: where it goes.
        block: 128 quantises to float8 in blocks of 128 x 128 of the parameter's last two dimensions, counted from its
            origin; the scales go to the tensor `region + SCALE_SUFFIX`. 0: no quantisation.
    """

    parameter: str
    dtype: str
    source: Placement
    region: str
    to: str
    target: Target
    block: int = 0

    def __post_init__(self) -> None:
        check_conversion(self.dtype, self.to, self.block)
        if self.source.shape != self.target.placement.shape:
            raise ValueError(
                f"{self.parameter}: the trainer has shape {self.source.shape}, {self.region} wants "
                f"{self.target.placement.shape}"
            )
        if self.block and len(self.source.shape) < 2:
            raise ValueError(f"{self.parameter}: blocks need two dimensions, the shape is {self.source.shape}")

    @property
    def bytes(self) -> int:
        """Bytes of the elements, written once."""
        return int(np.prod(self.source.shape, dtype=np.int64)) * ITEM_BYTES[self.to]


SCALE_SUFFIX = "_scale_inv"


def alone(placement: Placement, axes: Sequence[int] | None = None) -> Target:
    """Return the target of a parameter that has a tensor of its own; `axes=(1, 0)` transposes."""
    return fused([placement], axes=axes)[0]


def fused(parts: Sequence[Placement], dim: int = 0, axes: Sequence[int] | None = None) -> list[Target]:
    """Return targets of parameters that each rank concatenates, in order, along dimension `dim` of the local tensor.

    Args:
        parts: which box of each part a rank wants; all parts are wanted by the same ranks.
        dim: dimension of the local tensor (after transposing) that grows.
        axes: as in Target, the same for each part.

    Raises:
        ValueError: ranks differ, or the parts differ in another dimension than `dim`.
    """
    order = tuple(axes) if axes is not None else tuple(range(len(parts[0].shape)))
    sorted_ranks = np.sort(parts[0].ranks)
    rows = [np.argsort(part.ranks) for part in parts]
    if any(not np.array_equal(part.ranks[row], sorted_ranks) for part, row in zip(parts, rows, strict=True)):
        raise ValueError("parts of a fused tensor must be wanted by the same ranks")
    extents = []
    for part, row in zip(parts, rows, strict=True):
        extent = np.ones((len(row), len(order)), np.int64)
        extent[:, list(order)] = part.sizes[row]
        extents.append(extent)
    whole = extents[0].copy()
    if whole.shape[1]:
        whole[:, dim] = sum(extent[:, dim] for extent in extents)
    targets, at = [], np.zeros_like(whole)
    for part, row, extent in zip(parts, rows, extents, strict=True):
        others = [axis for axis in range(whole.shape[1]) if axis != dim]
        if not np.array_equal(extent[:, others], whole[:, others]):
            raise ValueError(f"parts of a fused tensor must agree in all dimensions but {dim}")
        back = np.argsort(row)
        targets.append(Target(part, order, at[back].copy(), whole[back]))
        if whole.shape[1]:
            at[:, dim] += extent[:, dim]
    return targets


def stacked(target: Target, slots: Ints, length: int) -> Target:
    """Return a target whose local tensor has one more dimension in front, of `length`, each box at its `slots` there.

    For experts: a rank that keeps `length` of them puts each into a slot of one tensor.
    """
    slots = np.broadcast_to(np.asarray(slots, np.int64), (len(target.origins),))
    origins = np.concatenate([slots[:, None], target.origins], axis=1)
    lengths = np.full((len(origins), 1), length, np.int64)
    shapes = np.concatenate([lengths, target.local_shapes], axis=1)
    return Target(target.placement, tuple(axis + 1 for axis in target.axes), origins, shapes)
