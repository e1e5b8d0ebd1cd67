"""Every kernel of the rail on GPUs, without torch: what compute-sanitizer runs, which slows whatever is loaded.

Two fabrics of one process, on the first and the last GPU: page lists of many shapes, aligned and not, alone and many at
once, and every byte compared. Ends with 0 when all was right.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import anyio
import numpy as np

import asyncfabric as af
from asyncfabric._gpu import open_driver
from asyncfabric.bench.pattern import Bytes, Pages

MIB = 1 << 20
LENGTH = 48 * MIB
POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """One list: pages of `page_bytes`, `stride` apart, from `shift` on; in `calls` calls at once."""

    count: int
    page_bytes: int
    stride: int
    shift: int = 0
    calls: int = 1


SHAPES = (
    Shape(1, 4096, 4096),
    Shape(3, 4096, 4096),  # too few for a kernel
    Shape(4, 16, 16),
    Shape(5, 48, 64, 16),
    Shape(264, 8192, 8192),
    Shape(1000, 8208, 8224, 32),
    Shape(2500, 4096, 4096),  # three requests, one launch
    Shape(100, 256 * 1024, 256 * 1024),
    Shape(40, 256 * 1024 + 16, 512 * 1024),  # too long for a kernel
    Shape(300, 4095, 4096),  # odd lengths: no kernel
    Shape(300, 4096, 4096, 8),
    Shape(300, 4096, 4100),
    Shape(700, 2048, 2048, 0, 25),  # more lists than one launch takes
    Shape(100_000, 16, 16, 0, 8),  # more pages than the room that lists lie in
)


def _gpus() -> int:
    return open_driver().count()


def copied(target: Bytes, source: Bytes, shape: Shape, source_pages: Pages, target_pages: Pages) -> None:
    """Do what the fabric is asked to do."""
    if shape.page_bytes > 512:
        for one, other in zip(source_pages.tolist(), target_pages.tolist(), strict=True):
            begin, end = shape.shift + one * shape.stride, shape.shift + other * shape.stride
            target[end : end + shape.page_bytes] = source[begin : begin + shape.page_bytes]
        return
    columns = shape.shift + np.arange(shape.page_bytes)
    target[target_pages[:, None] * shape.stride + columns] = source[source_pages[:, None] * shape.stride + columns]


async def _attempt(
    shape: Shape, writer: af.Fabric, target: af.Fabric, filler: af.Region, back: af.Region, far: str
) -> str:
    source = await writer.allocate(LENGTH, device="cuda:0")
    exposed = await target.allocate(LENGTH, device=far)
    counter = target.counter()
    random = np.random.default_rng(shape.count)
    sent = np.frombuffer(filler.memory, np.uint8)
    sent[:] = random.integers(0, 256, LENGTH, np.uint8)
    await writer.write(filler, source.key(), 0)
    expected = np.full(LENGTH, POISON, np.uint8)
    content = sent.copy()
    sent[:] = POISON
    await writer.write(filler, exposed.key(), 0)
    room = (LENGTH - shape.shift - shape.page_bytes) // shape.stride
    lists = []
    targets = random.permutation(room)[: shape.count * shape.calls]
    for part in np.split(targets, shape.calls):
        lists.append((random.integers(0, room, shape.count), part))
    transfers = []
    for sources, into in lists:
        transfers.append(
            writer.write_pages(
                source,
                sources,
                exposed.key(),
                into,
                page_bytes=shape.page_bytes,
                source_stride=shape.stride,
                target_stride=shape.stride,
                source_offset=shape.shift,
                target_offset=shape.shift,
                imm=counter.imm,
            )
        )
        copied(expected, content, shape, sources, into)
    for transfer in transfers:
        await transfer
    await counter.wait(shape.count * shape.calls)
    await target.read(exposed.key(), 0, back)
    wrong = np.flatnonzero(np.frombuffer(back.memory, np.uint8) != expected)
    await source.release()
    await exposed.release()
    counter.close()
    return f"byte {wrong[0]} and {wrong.size - 1} more" if wrong.size else ""


async def wrong_lists() -> int:
    """Return how many shapes came out wrong; a line for each."""
    far = f"cuda:{_gpus() - 1}"
    failures = 0
    async with (
        af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as writer,
        af.open_fabric(af.FabricConfig(rails=(far,))) as target,
    ):
        filler, back = await writer.allocate(LENGTH), await target.allocate(LENGTH)
        for shape in SHAPES:
            wrong = await _attempt(shape, writer, target, filler, back, far)
            failures += bool(wrong)
            print(f"{shape}: {wrong or 'right'}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(1 if anyio.run(wrong_lists, backend="trio") else 0)
