"""The record that opens a step between two members: who sends how many rows where, and what each row is about.

Pure functions over the bytes of a slot's front. The record ends where the private rows begin and grows backwards with
the number of rows: [origins][experts][weights][scales][head]. So its reader finds the head at a known place.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.moe.host.buffers import HEAD_BYTES, LaneShape
from asyncfabric.moe.host.routing import Experts, Ints

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MAGIC = 0x454F4D01
_HEAD = struct.Struct("<IIQII8x")  # magic, member, step, rows, members
assert _HEAD.size == HEAD_BYTES


class Rows(NamedTuple):
    """What rows are about.

    Attributes:
        origins: where each row comes from: rank * max_tokens + token.
        experts: shape [rows, top_k]; -1 for choices that belong to another member.
        weights: shape [rows, top_k].
        scales: shape [rows, scales].
    """

    origins: Experts
    experts: Experts
    weights: Floats
    scales: Floats

    def between(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end)."""
        origins, experts, weights, scales = self
        return Rows(origins[begin:end], experts[begin:end], weights[begin:end], scales[begin:end])


class Record(NamedTuple):
    """A record as it was read.

    Attributes:
        step: the number that the sender gave the step.
        counts: how many rows the sender has for each member in this step.
        rows: what its rows for this member are about.
    """

    step: int
    counts: Ints
    rows: Rows


def record_bytes(shape: LaneShape, rows: int) -> int:
    """Return the length of a record about so many rows."""
    return shape.head_bytes + rows * shape.meta_bytes


def write_record(front: Bytes, shape: LaneShape, member: int, step: int, counts: Ints, rows: Rows) -> None:
    """Write a record to the end of a slot's front.

    Args:
        front: the front of the slot, `shape.front_rows` rows.
        shape: of the lane.
        member: the sender.
        step: number of the step.
        counts: rows that the sender has for each member.
        rows: what the rows for the reader of this record are about.
    """
    head_at = len(front) - shape.head_bytes
    _HEAD.pack_into(front.data, head_at, MAGIC, member, step, len(rows.origins), shape.members)
    listed = front[head_at + HEAD_BYTES : head_at + HEAD_BYTES + 4 * shape.members].view(np.uint32)
    listed[:] = counts
    at = head_at - len(rows.origins) * shape.meta_bytes
    for part, kind in zip(rows, (np.int32, np.int32, np.float32, np.float32), strict=True):
        target = front[at : at + 4 * part.size].view(kind)
        target[:] = part.reshape(-1)
        at += 4 * part.size


def step_of(front: Bytes, shape: LaneShape) -> int:
    """Return the step number in a front, -1 when none was ever written."""
    magic, _, step, _, _ = _HEAD.unpack_from(front.data, len(front) - shape.head_bytes)
    return int(step) if magic == MAGIC else -1


def read_record(front: Bytes, shape: LaneShape, reader: int, member: int, step: int) -> Record:
    """Read the record of a member from the end of a slot's front; the arrays look at the slot, they are no copies.

    Raises:
        RemoteProtocolError: this is no record of that member for that step, or its numbers are out of bounds.
    """
    head_at = len(front) - shape.head_bytes
    magic, sender, found, rows, members = _HEAD.unpack_from(front.data, head_at)
    counts = front[head_at + HEAD_BYTES : head_at + HEAD_BYTES + 4 * shape.members].view(np.uint32).astype(np.int64)
    if (magic, sender, found, members) != (MAGIC, member, step, shape.members):
        raise RemoteProtocolError(
            f"member {member} sent no record of step {step}: {magic:#x}, member {sender} of {members}, step {found}",
            remedy="all ranks must dispatch and combine in the same order, with the same configuration",
        )
    if rows > shape.max_tokens or counts[reader] != rows or counts.max() > shape.max_tokens:
        raise RemoteProtocolError(f"member {member} announces {rows} rows, at most {shape.max_tokens} are agreed")
    begin = head_at - rows * shape.meta_bytes
    words = front[begin:head_at].view(np.int32)
    experts, weights, scales = rows, rows * (1 + shape.top_k), rows * (1 + 2 * shape.top_k)
    about = Rows(
        words[:experts],
        words[experts:weights].reshape(rows, shape.top_k),
        words[weights:scales].view(np.float32).reshape(rows, shape.top_k),
        words[scales:].view(np.float32).reshape(rows, shape.scales),
    )
    return Record(found, counts, about)
