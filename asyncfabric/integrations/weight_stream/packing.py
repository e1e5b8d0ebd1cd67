"""Packing: which bytes of a stream of tensors lie where in which bucket; the same at every rank that sees the stream.

Pure. A tensor that fits into a bucket lies in one; a larger one continues in the buckets behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import msgspec
import torch

ALIGNMENT = 64
"""Of each part in its bucket, so that a tensor of any element type can lie there."""


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [begin, begin + length) of a tensor, and where they lie in a bucket.

    Attributes:
        name, dtype, shape: of the whole tensor; dtype as in `torch.bfloat16`, without "torch.".
        begin, length: bytes of it.
        place: first byte in the bucket.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    length: int
    place: int

    def tensor_bytes(self) -> int:
        """Return the bytes of the whole tensor.

        Raises:
            ValueError: torch has no such element type.
        """
        return prod(self.shape) * dtype_named(self.dtype).itemsize


class PlacedPart(NamedTuple):
    """A part, and the number of its bucket."""

    bucket: int
    part: TensorPart


class Packing:
    """The places of a stream of tensors in buckets.

    Attributes:
        bucket: number of the one that is being filled.
        filled: bytes of it.
    """

    def __init__(self, bucket_bytes: int) -> None:
        """Begin with bucket 0; raises ValueError for fewer than 64 bytes."""
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"a bucket needs at least {ALIGNMENT} bytes, got {bucket_bytes}")
        self.bucket_bytes: int = bucket_bytes // ALIGNMENT * ALIGNMENT
        self.bucket: int = 0
        self.filled: int = 0
        self._seen = blake2b(digest_size=16)

    def parts(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Iterator[PlacedPart]:
        """Place the next tensor of the stream."""
        kind, sides = str(dtype).removeprefix("torch."), tuple(shape)
        self._seen.update(repr((name, kind, sides)).encode())
        size, begin = prod(sides) * dtype.itemsize, 0
        if size <= self.bucket_bytes < self.filled + size:
            self._turn()
        while True:
            if self.filled >= self.bucket_bytes:
                self._turn()
            length = min(size - begin, self.bucket_bytes - self.filled)
            yield PlacedPart(self.bucket, TensorPart(name, kind, sides, begin, length, self.filled))
            self.filled += -(-length // ALIGNMENT) * ALIGNMENT
            begin += length
            if begin >= size:
                return

    def digest(self) -> bytes:
        """Return 16 bytes that distinguish streams of other names, types, shapes or order."""
        return self._seen.digest()

    def _turn(self) -> None:
        self.bucket, self.filled = self.bucket + 1, 0


def dtype_named(name: str) -> torch.dtype:
    """Return an element type by its name without "torch."; raises ValueError where torch has none of it."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no element type {name!r}")
    return found
