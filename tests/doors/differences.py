"""Where ours answers otherwise than the real NIXL, each with its reason; docs/guide/nixl.md shows this table to users.

A test that asserts something else on ours asks `face.differs(NAME)`, so that no difference goes unlisted.
"""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """One row of the table: in what, what each of the two does, and why ours does it."""

    topic: str
    nixl: str
    ours: str
    reason: str


DIFFERENCES = {
    "forms": Difference(
        "`get_xfer_descs`, `get_reg_descs` of another form, or without a memory type",
        "log, return `None`; the next call raises `TypeError`",
        "raise `TypeError`",
        "the text names the form where the mistake is made",
    ),
    "arrays": Difference(
        "arrays of other integers than 64 bits, or not contiguous",
        "`ValueError`",
        "taken",
        "nothing is ambiguous in them",
    ),
    "numbers": Difference(
        "numbers of a descriptor or an index that are no integers, tuples that are too short",
        "`RuntimeError` or `IndexError` of its binding",
        "`TypeError`, for an index `nixlInvalidParamError`",
        "the text names the number",
    ),
    "backends": Difference(
        "an agent with `backends=[]`",
        "refuses memory and metadata until `create_backend`",
        "works",
        "one fabric stands behind every backend and is open from the start",
    ),
    "nothing": Difference(
        "descriptors of no bytes outside registered memory, as `(0, 0, 0)`",
        "`nixlNotFoundError`, unless just that is registered",
        "move nothing",
        "no memory is touched",
    ),
    "release": Difference(
        "`release_xfer_handle` in flight",
        "returns at once; the bytes of a READ may still arrive in memory that was given back",
        "returns when nothing can touch the memory any more, bounded by `drain_deadline`",
        "memory is safe to use again after release",
    ),
    "freed": Difference(
        "calls with a released handle or list, an index beyond a list",
        "undefined: reads freed memory, may crash",
        "`nixlInvalidParamError`; `IndexError` for the index",
        "misuse is refused",
    ),
    "deregistered": Difference(
        "transfer to memory that its owner deregistered after the handle was made",
        "moves the bytes where the mapping still is",
        "refused: the key is dead, the transfer raises or ends in `ERR`",
        "memory that was given back is not written",
    ),
    "metadata": Difference(
        "`add_remote_agent` with metadata that is cut off",
        "raises, and forgets the agent it knew",
        "raises, and keeps what it knew",
        "a damaged message undoes nothing",
    ),
    "note-backend": Difference(
        '`send_notif(..., backend="UCX")`',
        "`TypeError` of its binding",
        "sends the note",
        "the argument is documented",
    ),
}
