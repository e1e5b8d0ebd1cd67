"""BucketSender: one trainer rank's share of an update. All see every tensor; bucket b is filled by rank b % ranks.

The thread of the caller's event loop fills buckets; waits for receivers are in a thread of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import torch

from asyncfabric.blocking import Region
from asyncfabric.integrations.weight_stream.packing import Packing, TensorPart
from asyncfabric.integrations.weight_stream.post import BucketReady, BucketTaken, StreamEnded, WeightPost
from asyncfabric.integrations.weight_stream.waiting import in_thread, settle

ALL = -1
"""In place of a bucket: the receiver has the whole stream."""

NamedWeights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


class BucketSender:
    """Sends one stream of tensors to all receivers, its own buckets of it."""

    def __init__(self, post: WeightPost, region: Region, bucket_bytes: int, rank: int, ranks: int) -> None:
        """Send from two buckets that lie one behind the other in a region that peers may read."""
        self._post = post
        self._rank, self._ranks = rank, ranks
        self._packing = Packing(bucket_bytes)
        self._bytes = region.tensor(torch.uint8)
        self._key = bytes(region.key("read"))
        self._open: dict[int, set[str]] = {}  # own buckets, and ALL: receivers that have not taken it
        self._slots = [0, self._packing.bucket_bytes]  # offsets of buckets that are free
        self._offsets: dict[int, int] = {}

    async def send(self, weights: NamedWeights) -> int:
        """Send a stream of tensors; returns the bytes of this rank once every receiver has all of it.

        A tensor may change again when the next one is asked for.

        Raises:
            PeerError: a receiver ended.
            BrokenError: a receiver gave the update up.
            Exception: whatever the stream raised; receivers raise BrokenError then.

        Cancellation: receivers are notified that the update is given up.
        """
        sent, parts, current = 0, list[TensorPart](), 0
        try:
            async for name, tensor in _aiter(weights):
                flat: torch.Tensor | None = None
                for bucket, part in self._packing.parts(name, tensor.dtype, tensor.shape):
                    if bucket != current:
                        sent += await self._finish(current, parts)
                        current, parts = bucket, []
                    if bucket % self._ranks != self._rank:
                        continue
                    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if flat is None else flat
                    await self._fill(bucket, part, flat)
                    parts.append(part)
            sent += await self._finish(current, parts)
            self._open[ALL] = set(self._post.others)
            self._post.send(self._post.others, StreamEnded(current + 1, self._packing.digest()))
            await in_thread(self._post, self._wait_taken_all)
        except BaseException as error:
            self._post.fail(f"{type(error).__name__}: {error}")
            raise
        return sent

    async def _fill(self, bucket: int, part: TensorPart, flat: torch.Tensor) -> None:
        if bucket not in self._offsets:
            if not self._slots:
                await in_thread(self._post, self._wait_slot)
            self._offsets[bucket] = self._slots.pop()
        begin = self._offsets[bucket] + part.place
        self._bytes[begin : begin + part.length].copy_(flat[part.begin : part.begin + part.length], non_blocking=True)

    async def _finish(self, bucket: int, parts: list[TensorPart]) -> int:
        if not parts:
            return 0
        settle(self._bytes)
        length = parts[-1].place + parts[-1].length
        self._open[bucket] = set(self._post.others)
        ready = BucketReady(bucket, self._key, self._offsets[bucket], length, parts)
        self._post.send(self._post.others, ready)
        return length

    # ---- in the thread that waits

    def _wait_slot(self) -> None:
        while not self._slots:
            self._take_one()

    def _wait_taken_all(self) -> None:
        while self._open:
            self._take_one()

    def _take_one(self) -> None:
        watched = set[str]().union(*self._open.values())
        sender, message = self._post.receive(watched)
        if not isinstance(message, BucketTaken) or message.bucket not in self._open:
            return
        missing = self._open[message.bucket]
        missing.discard(sender)
        if not missing:
            del self._open[message.bucket]
            if message.bucket != ALL:
                self._slots.append(self._offsets.pop(message.bucket))


async def _aiter(weights: NamedWeights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for pair in weights:
            yield pair
        return
    for pair in weights:
        yield pair
