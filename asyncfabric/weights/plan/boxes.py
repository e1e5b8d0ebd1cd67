"""Boxes: start and size along each dimension, cut and intersected in columns; boxes that several ranks want. Pure.

A family is a set of equal boxes of one kind that several ranks of a node receive, so that one of them can forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Overlaps(NamedTuple):
    """Every pair of boxes that share elements: the two indices, and the box that they share."""

    left: Ints
    right: Ints
    starts: Ints
    sizes: Ints


def intersect(left_starts: Ints, left_sizes: Ints, right_starts: Ints, right_sizes: Ints) -> Overlaps:
    """Return all overlaps of two lists of boxes, ordered by the left index, then by the right one."""
    low = np.maximum(left_starts[:, None], right_starts[None])
    high = np.minimum((left_starts + left_sizes)[:, None], (right_starts + right_sizes)[None])
    left, right = np.nonzero((high > low).all(axis=2))
    starts = low[left, right]
    return Overlaps(left, right, starts, high[left, right] - starts)


def volumes(sizes: Ints) -> Ints:
    """Return the elements of each box; a box without dimensions has one."""
    return np.asarray(np.prod(sizes, axis=1, dtype=np.int64))


def grid(starts: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return (starts, sizes) of the cells that all faces of the boxes cut their hull into, in row-major order.

    No face of a box goes through a cell, so a cell is inside of a box or outside: where boxes overlap in part, each
    element still belongs to exactly one cell.
    """
    cuts = [np.unique(np.concatenate([starts[:, dim], (starts + sizes)[:, dim]])) for dim in range(starts.shape[1])]
    begins = np.meshgrid(*[cut[:-1] for cut in cuts], indexing="ij")
    widths = np.meshgrid(*[np.diff(cut) for cut in cuts], indexing="ij")
    if not cuts:
        return np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64)
    return (
        np.stack([each.reshape(-1) for each in begins], axis=1),
        np.stack([each.reshape(-1) for each in widths], axis=1),
    )


def contains(outer_starts: Ints, outer_sizes: Ints, starts: Ints, sizes: Ints) -> NDArray[np.bool_]:
    """Return a matrix (boxes, outer boxes): whether each box lies within each outer box."""
    above = (starts[:, None] >= outer_starts[None]).all(axis=2)
    below = ((starts + sizes)[:, None] <= (outer_starts + outer_sizes)[None]).all(axis=2)
    return np.asarray(above & below)


def row_major_strides(shapes: Ints) -> Ints:
    """Return the strides, in elements, of contiguous tensors of these shapes (tensors, dimensions)."""
    strides = np.ones_like(shapes)
    for dim in range(shapes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shapes[:, dim + 1]
    return strides


def split(starts: Ints, sizes: Ints, most: int, grain: int) -> tuple[Ints, Ints, Ints]:
    """Cut boxes of more than `most` elements; return (index of the box, starts, sizes).

    A box is cut along its first dimension that is longer than one; along one of the last two dimensions in steps of
    `grain`, counted from the tensor's origin. A slice of one step may stay larger than `most`.
    """
    dims = starts.shape[1]
    volume = volumes(sizes)
    if dims == 0 or not (volume > most).any():
        return np.arange(len(starts)), starts, sizes
    dim = np.where((sizes > 1).any(axis=1), np.argmax(sizes > 1, axis=1), 0)
    rows = np.arange(len(starts))
    begin, length = starts[rows, dim], sizes[rows, dim]
    unit = np.where(dim >= dims - 2, grain, 1)
    step = np.maximum(most * length // np.maximum(volume, 1) // unit * unit, unit)
    step = np.where(volume > most, step, begin + length)  # the first step reaches the end: one slice
    first = begin // step
    counts = -(-(begin + length) // step) - first
    index = np.repeat(rows, counts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum((first[index] + nth) * step[index], begin[index])
    high = np.minimum((first[index] + nth + 1) * step[index], (begin + length)[index])
    out_starts, out_sizes = starts[index].copy(), sizes[index].copy()
    every = np.arange(len(index))
    out_starts[every, dim[index]] = low
    out_sizes[every, dim[index]] = high - low
    return index, out_starts, out_sizes


class Families(NamedTuple):
    """Pieces of one kind with equal boxes whose receivers share a node.

    Attributes:
        leader: for each piece the first piece of its family.
        group: for leaders the number of the family's set of receivers in `groups`; -1 for other pieces.
        groups: distinct sets of receivers.
    """

    leader: Ints
    group: Ints
    groups: list[tuple[int, ...]]


def families(kind: Ints, twin: Ints, receiver: Ints, node_ranks: int) -> Families:
    """Return the families of pieces, given the kind, twin and receiver of each; see `geometry.Pieces`."""
    count = len(kind)
    node = receiver // node_ranks
    order = np.lexsort((receiver, node, twin, kind))
    columns = np.stack([kind[order], twin[order], node[order]])
    begins = (
        np.flatnonzero(np.concatenate([[True], (np.diff(columns) != 0).any(axis=0)])) if count else np.zeros(0, int)
    )
    leader = np.empty(count, np.int64)
    leader[order] = np.repeat(order[begins], np.diff([*begins.tolist(), count]))
    return Families(leader, *_groups(order, begins, receiver))


def _groups(order: Ints, begins: Ints, receiver: Ints) -> tuple[Ints, list[tuple[int, ...]]]:
    group = np.full(len(order), -1, np.int64)
    known: dict[tuple[int, ...], int] = {}
    everyone: Sequence[int] = receiver[order].tolist()
    firsts = order[begins].tolist()
    bounds = [*begins.tolist(), len(order)]
    for first, begin, end in zip(firsts, bounds[:-1], bounds[1:], strict=True):
        group[first] = known.setdefault(tuple(everyone[begin:end]), len(known))
    return group, list(known)
