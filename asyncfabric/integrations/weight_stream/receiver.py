"""BucketReceiver: one rollout rank reads the buckets of an update in their order, each while the one before is used.

The thread of the caller's event loop, apart from waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

import torch

from asyncfabric._api.key import RegionKey
from asyncfabric.blocking import Fabric, Region, Transfer
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.integrations.reading import give_up, submit_read
from asyncfabric.integrations.weight_stream.packing import TensorPart, dtype_named
from asyncfabric.integrations.weight_stream.post import BucketReady, BucketTaken, PostMessage, StreamEnded, WeightPost
from asyncfabric.integrations.weight_stream.sender import ALL
from asyncfabric.integrations.weight_stream.waiting import in_thread, settle


class _Reading(NamedTuple):
    ready: BucketReady
    sender: str
    offset: int
    transfer: Transfer


class BucketReceiver:
    """Receives one stream of tensors from all trainer ranks."""

    def __init__(self, post: WeightPost, fabric: Fabric, region: Region, bucket_bytes: int) -> None:
        """Receive into two buckets that lie one behind the other in a region."""
        self._post = post
        self._fabric = fabric
        self._region = region
        self._bytes = region.tensor(torch.uint8)
        self._bucket_bytes = bucket_bytes
        self._free = deque([0, bucket_bytes])  # offsets
        self._next = 0  # bucket that is submitted next
        self._announced: dict[int, tuple[str, BucketReady]] = {}
        self._ended: dict[str, StreamEnded] = {}
        self._readings: deque[_Reading] = deque()
        self._large: tuple[TensorPart, torch.Tensor] | None = None  # a tensor of several buckets, and its bytes

    async def receive(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Iterate over names and tensors; a tensor may be overwritten once the next one was asked for.

        Raises:
            PeerError: a trainer rank ended.
            BrokenError: a trainer rank gave the update up.
            RemoteProtocolError: the ranks' streams differ, or a bucket does not fit.

        Cancellation: reads are cancelled, and trainer ranks are notified that the update is given up.
        """
        try:
            while (reading := await in_thread(self._post, self._wait_next)) is not None:
                for part in reading.ready.parts:
                    tensor = self._tensor(part, reading.offset)
                    if tensor is not None:
                        yield part.name, tensor
                        self._submit_nowait()
                settle(self._bytes)
                self._free.append(reading.offset)
            if self._large is not None:
                raise RemoteProtocolError(f"the stream ended within {self._large[0].name}")
            self._post.send(self._post.others, BucketTaken(ALL))
        except BaseException as error:
            give_up([reading.transfer for reading in self._readings])
            self._post.fail(f"{type(error).__name__}: {error}")
            raise

    def _tensor(self, part: TensorPart, offset: int) -> torch.Tensor | None:
        """Return a tensor that is whole with this part, None for one that is not."""
        size, begin = part.tensor_bytes(), offset + part.place
        found = self._bytes[begin : begin + part.length]
        if part.length < size:
            if part.begin == 0:
                self._large = part, torch.empty(size, dtype=torch.uint8, device=self._bytes.device)
            if self._large is None or self._large[0].name != part.name or part.begin + part.length > size:
                raise RemoteProtocolError(f"a part of {part.name} came without the parts before it")
            whole = self._large[1]
            whole[part.begin : part.begin + part.length].copy_(found)
            if part.begin + part.length < size:
                return None
            self._large, found = None, whole
        return found.view(dtype_named(part.dtype)).reshape(part.shape)

    def _submit_nowait(self) -> None:
        while (found := self._post.take_nowait()) is not None:
            self._note(*found)
        self._submit()

    # ---- in the thread that waits

    def _wait_next(self) -> _Reading | None:
        """Return the next bucket, read; None at the end of the stream."""
        self._submit_nowait()
        while not self._readings:
            if self._at_end():
                return None
            self._note(*self._post.receive(self._post.others))
            self._submit()
        reading = self._readings[0]
        reading.transfer.wait()
        self._readings.popleft()
        self._post.send([reading.sender], BucketTaken(reading.ready.bucket))
        return reading

    def _at_end(self) -> bool:
        if len(self._ended) < len(self._post.others):
            return False
        if len(set(self._ended.values())) > 1:
            raise RemoteProtocolError("trainer ranks have streams of tensors that differ in names, shapes or order")
        return self._next >= next(iter(self._ended.values())).buckets

    def _note(self, sender: str, message: PostMessage) -> None:
        if isinstance(message, BucketReady):
            self._announced[message.bucket] = sender, message
        elif isinstance(message, StreamEnded):
            self._ended[sender] = message

    def _submit(self) -> None:
        while self._free and self._next in self._announced:
            sender, ready = self._announced.pop(self._next)
            if not 0 <= ready.length <= self._bucket_bytes or not _within(ready):
                raise RemoteProtocolError(
                    f"bucket {ready.bucket} of {sender} has {ready.length} bytes, which is not within a bucket here"
                )
            offset = self._free.popleft()
            key = RegionKey.from_bytes(ready.key)
            transfer = submit_read(self._fabric, key, ready.offset, self._region[offset : offset + ready.length])
            self._readings.append(_Reading(ready, sender, offset, transfer))
            self._next += 1


def _within(ready: BucketReady) -> bool:
    return all(min(one.place, one.length) >= 0 and one.place + one.length <= ready.length for one in ready.parts)
