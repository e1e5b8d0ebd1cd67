"""The record that opens a step between two members: who sends how many rows where, and what each row is about.

Pure functions over the bytes of a slot's front. The record ends where the private rows begin and grows backwards with
the number of rows: [origins][experts][weights][scales][head]. So its reader finds the head at a known place. The loops
that write and read it are compiled: peers may write to a front while it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfabric._kernels.records import RefusedHead
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.loops import record_loops
from asyncfabric.moe.host.routing import Experts, Ints, Route

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


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


class Records(NamedTuple):
    """The records of all members, as they were read.

    Attributes:
        counts: rows from each member (first index) to each member in this step.
        offsets: where the rows of each member begin; one more entry ends the last.
        rows: what the rows for the reader are about.
    """

    counts: Ints
    offsets: Ints
    rows: Rows


def find_route(experts: Experts, owner: Ints, members: int) -> Route:
    """Return the route of tokens with these experts, shape [tokens, top_k]: that of `plan_route`, compiled.

    Raises:
        IndexError: experts that do not exist.
    """
    count, choices = experts.shape
    tokens, offsets = np.empty(count * min(choices, members), dtype=np.int64), np.empty(members + 1, dtype=np.int64)
    used = record_loops().plan_route(experts, owner, tokens, offsets)
    return Route(tokens[:used], offsets)


def write_records(fronts: Sequence[Bytes], member: int, step: int, about: Rows, owner: Ints, route: Route) -> None:
    """Write the records for all members to the ends of their fronts.

    Args:
        fronts: of the slots, one for each member.
        member: the sender.
        step: number of the step.
        about: what all tokens of the step are about.
        owner: the member of each expert, or -1.
        route: which tokens go to whom.

    Raises:
        IndexError: sizes do not fit each other, or experts that do not exist.
    """
    record_loops().write_records(fronts, member, step, *about, owner, route.tokens, route.offsets)


def read_records(fronts: Sequence[Bytes], shape: LaneShape, reader: int, step: int) -> Records:
    """Read the records of all members from the ends of their fronts; the arrays are copies.

    Raises:
        RemoteProtocolError: one is no record of its member for that step, or its numbers are out of bounds.
    """
    members, loops = shape.members, record_loops()
    counts, offsets = np.empty((members, members), dtype=np.int64), np.empty(members + 1, dtype=np.int64)
    refused = loops.read_heads(fronts, reader, step, shape.max_tokens, counts, offsets)
    if refused is not None:
        raise _error(RefusedHead(*refused), shape, step)
    rows = int(offsets[-1])
    about = Rows(
        np.empty(rows, dtype=np.int32),
        np.empty((rows, shape.top_k), dtype=np.int32),
        np.empty((rows, shape.top_k), dtype=np.float32),
        np.empty((rows, shape.scales), dtype=np.float32),
    )
    loops.read_rows(fronts, offsets, *about)
    return Records(counts, offsets, about)


def _error(head: RefusedHead, shape: LaneShape, step: int) -> RemoteProtocolError:
    if head.foreign:
        return RemoteProtocolError(
            f"member {head.member} sent no record of step {step}: {head.magic:#x}, member {head.sender} of"
            f" {head.members}, step {head.step}",
            remedy="all ranks must dispatch and combine in the same order, with the same configuration",
        )
    return RemoteProtocolError(
        f"member {head.member} announces {head.rows} rows, at most {shape.max_tokens} are agreed"
    )
