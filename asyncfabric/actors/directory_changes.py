"""What the directory states, as changes of the membership; and the labels in which a node reports more than its role.

Pure; no I/O of its own: `membership.follow(member_changes(changes))` inside `async with client.watch() as changes`.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
from collections.abc import AsyncIterable, AsyncIterator

from asyncfabric.actors.membership import Drains, Gone, Joined, Member, MemberChange
from asyncfabric.control.directory import Node, NodeChange

logger: logging.Logger = logging.getLogger(__name__)
FABRIC_LABEL = "fabric"
LOAD_LABEL = "load"
LONGEST_LABEL = 512  # characters, the directory's limit


def labels_of(fabric_address: bytes = b"", load: float = 0.0) -> dict[str, str]:
    """Return the labels to register with, so that others know where the fabric is and how loaded the node is.

    Raises:
        ValueError: the address is longer than a label holds (384 bytes, some six rails), or the load is not finite.
    """
    text = base64.b64encode(fabric_address).decode()
    if len(text) > LONGEST_LABEL:
        raise ValueError(
            f"a fabric address in a label has at most 384 bytes, got {len(fabric_address)}: open fewer rails"
        )
    if not math.isfinite(load):
        raise ValueError(f"load must be a finite number, got {load}")
    return ({FABRIC_LABEL: text} if text else {}) | {LOAD_LABEL: repr(float(load))}


def member_of(node: Node) -> Member:
    """Return a node of the directory as a member; labels that make no sense count as not given."""
    try:
        fabric_address = base64.b64decode(node.labels.get(FABRIC_LABEL, ""), validate=True)
        load = float(node.labels.get(LOAD_LABEL, "0"))
    except (binascii.Error, ValueError) as error:
        logger.warning("the labels of %s cannot be read: %s", node.identity, error)
        fabric_address, load = b"", 0.0
    if not math.isfinite(load):
        load = 0.0
    return Member(node.identity, node.role, node.address, fabric_address, load, node.state)


def member_changes(changes: AsyncIterable[NodeChange]) -> AsyncIterator[MemberChange]:
    """Iterate over what the directory's changes mean for the membership."""
    return _MemberChanges(changes)


class _MemberChanges(AsyncIterator[MemberChange]):
    def __init__(self, changes: AsyncIterable[NodeChange]) -> None:
        self._changes = aiter(changes)

    async def __anext__(self) -> MemberChange:
        change = await anext(self._changes)
        if change.kind in ("left", "lost"):
            return Gone(change.node.identity, change.reason or change.kind)
        if change.kind == "draining":
            return Drains(change.node.identity)
        return Joined(member_of(change.node))
