"""The path of a step: straight to the ranks of the experts, or by the nodes. Splits a step over one lane or two.

Runs on the event loop's thread. By the nodes: the first lane joins the ranks of the same place in their nodes, and a
token crosses it once for each node; the second joins the ranks of one node and fans out. Back, the node's ranks add up
what they have for a token before one row crosses to the token's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from asyncfabric._kernels.rows import RowBytes, Span
from asyncfabric.moe.host.backward import receive_back, send_back
from asyncfabric.moe.host.forward import Arrange, receive_rows, send_rows
from asyncfabric.moe.host.handle import MoeHandle
from asyncfabric.moe.host.lane import Lane
from asyncfabric.moe.host.loops import as_bytes
from asyncfabric.moe.host.record import Bytes, Rows
from asyncfabric.moe.host.routing import Ints


class Path(Protocol):
    """How the tokens of a step travel."""

    @property
    def mapped_ranks(self) -> tuple[int, ...]:
        """The ranks in whose memory this process stores itself, in the order of lanes."""

    async def send(self, number: int, epoch: int, payload: RowBytes, about: Rows) -> MoeHandle:
        """Begin a step. Cancellation: it did not begin."""

    async def receive(self, handle: MoeHandle, arrange: Arrange) -> Bytes:
        """Return the rows for this rank. Cancellation: nothing is lost, call it again."""

    async def send_back(self, handle: MoeHandle) -> None:
        """Send what this rank's experts made of them. Cancellation: shielded once begun."""

    async def receive_back(self, handle: MoeHandle) -> torch.Tensor:
        """Return the sums for the own tokens. Cancellation: nothing is lost, call it again."""


class Filler(Protocol):
    """Puts what goes back for arrived rows where it is sent from."""

    def __call__(self, handle: MoeHandle, spans: Sequence[Span], places: Sequence[Bytes]) -> None:
        """Fill the first rows of each place for the arrived rows of its span."""


class StraightPath:
    """One lane that joins all ranks."""

    def __init__(self, lane: Lane, owner: Ints, fill: Filler) -> None:
        """Send over `lane`, to the member that `owner` has for each expert."""
        self._lane = lane
        self._owner = owner
        self._fill = fill

    @property
    def mapped_ranks(self) -> tuple[int, ...]:
        """The ranks in whose memory this process stores itself."""
        return self._lane.mapped_ranks

    async def send(self, number: int, epoch: int, payload: RowBytes, about: Rows) -> MoeHandle:
        """Begin a step. Cancellation: it did not begin."""
        return MoeHandle(number, epoch, await send_rows(self._lane, number, payload, about, self._owner))

    async def receive(self, handle: MoeHandle, arrange: Arrange) -> Bytes:
        """Return the rows for this rank. Cancellation: nothing is lost, call it again."""
        return await receive_rows(self._lane, handle.first, arrange)

    async def send_back(self, handle: MoeHandle) -> None:
        """Send what this rank's experts made of them. Cancellation: shielded once begun."""
        await send_back(self._lane, handle.first, partial(self._fill, handle))

    async def receive_back(self, handle: MoeHandle) -> torch.Tensor:
        """Return the sums for the own tokens. Cancellation: nothing is lost, call it again."""
        return await receive_back(self._lane, handle.first, partial(self._fill, handle))


class NodePath:
    """Two lanes: across the nodes, then inside the node."""

    def __init__(self, across: Lane, inside: Lane, node_owner: Ints, rank_owner: Ints, fill: Filler) -> None:
        """`node_owner` has the node of each expert, `rank_owner` its place in this node or -1."""
        self._across = across
        self._inside = inside
        self._node_owner = node_owner
        self._rank_owner = rank_owner
        self._fill = fill

    @property
    def mapped_ranks(self) -> tuple[int, ...]:
        """The ranks in whose memory this process stores itself: across nodes, then in the node."""
        return self._across.mapped_ranks + self._inside.mapped_ranks

    async def send(self, number: int, epoch: int, payload: RowBytes, about: Rows) -> MoeHandle:
        """Begin a step. Cancellation: it did not begin."""
        return MoeHandle(number, epoch, await send_rows(self._across, number, payload, about, self._node_owner))

    async def receive(self, handle: MoeHandle, arrange: Arrange) -> Bytes:
        """Return the rows for this rank. Cancellation: nothing is lost, call it again."""
        if handle.inner is None:
            if handle.crossed is None:
                handle.crossed = await receive_rows(self._across, handle.first, _as_they_came)
            about = handle.first.rows
            assert about is not None
            handle.inner = await send_rows(self._inside, handle.number, handle.crossed, about, self._rank_owner)
        return await receive_rows(self._inside, handle.inner, arrange)

    async def send_back(self, handle: MoeHandle) -> None:
        """Send what this rank's experts made of them. Cancellation: shielded once begun."""
        assert handle.inner is not None
        await send_back(self._inside, handle.inner, partial(self._fill, handle))

    async def receive_back(self, handle: MoeHandle) -> torch.Tensor:
        """Return the sums for the own tokens. Cancellation: nothing is lost, call it again."""
        inner = handle.inner
        assert inner is not None
        if handle.node_sums is None:
            handle.node_sums = await receive_back(self._inside, inner, partial(self._fill, handle))
        sums = as_bytes(handle.node_sums)

        def fill_sums(spans: Sequence[Span], places: Sequence[Bytes]) -> None:
            for (begin, end), place in zip(spans, places, strict=True):
                place[: end - begin] = sums[begin:end]

        await send_back(self._across, handle.first, fill_sums)
        return await receive_back(self._across, handle.first, fill_sums)


def _as_they_came(_: Rows) -> None:
    return None
