"""How a fake engine cuts an op into legs, and what each leg does at the target: pure functions, checked arguments in.

Runs under the lock of the network. Bytes are moved by address when a leg is delivered, never when it is planned: what
the source holds in between is what arrives, as with a NIC.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing.fake_keys import FakeKey
from asyncfabric.testing.fake_memory import FakeRegion
from asyncfabric.testing.fake_ops import Leg
from asyncfabric.types import ACCESS_BITS, MAX_IMM

if TYPE_CHECKING:
    from asyncfabric.testing.fake_core import EngineCore

_WRITE, _READ = ACCESS_BITS["write"], ACCESS_BITS["read"]
_PAGES_PER_LEG = 256


@dataclass(frozen=True, slots=True)
class FakePages:
    """The page lists of one op: page `i` is at `index * stride + offset` of its side."""

    sources: memoryview
    targets: memoryview
    page_bytes: int
    source_stride: int
    target_stride: int
    source_offset: int
    target_offset: int


def check_imm(imm: int, *, required: bool = False) -> int:
    """Refuse what is neither -1 (none) nor an imm that users may name."""
    if not (0 if required else -1) <= imm <= MAX_IMM:
        raise refusal(StatusCode.INVALID_ARGUMENT, f"imm {imm} is not in 0..{MAX_IMM}")
    return imm


def check_key(key: FakeKey, offset: int, length: int, right: str) -> None:
    """Refuse a range that leaves the key, and a right that it does not carry."""
    if not key.access & ACCESS_BITS[right]:
        raise refusal(StatusCode.ACCESS_DENIED, f"the key does not carry the right to {right}")
    if offset < 0 or length < 0 or offset + length > key.length:
        raise refusal(StatusCode.OUT_OF_BOUNDS, f"offset {offset} length {length} of a key for {key.length} bytes")


def read_pages(source_pages: Any, target_pages: Any, *shape: int) -> FakePages:
    """Take two int64 page lists of one length; `shape` is the rest of Pages in its order."""
    lists = []
    for what, pages in (("source", source_pages), ("target", target_pages)):
        view = memoryview(pages)
        if view.itemsize != 8 or view.format not in ("q", "l") or view.ndim != 1 or not view.c_contiguous:
            raise refusal(StatusCode.INVALID_ARGUMENT, f"{what} pages must be a contiguous list of int64")
        lists.append(view.cast("B").cast("q") if len(view) else view)
    if len(lists[0]) != len(lists[1]):
        raise refusal(StatusCode.INVALID_ARGUMENT, f"{len(lists[0])} source pages, {len(lists[1])} target pages")
    pages = FakePages(lists[0], lists[1], *shape)
    if (len(lists[0]) and pages.page_bytes == 0) or min(shape) < 0:
        raise refusal(StatusCode.INVALID_ARGUMENT, f"page_bytes {pages.page_bytes}, strides and offsets {shape[1:]}")
    return pages


def check_pages(pages: FakePages, source_length: int, target_length: int) -> None:
    """Refuse a page that leaves the region or the key, naming it."""
    sides = (
        ("source", pages.sources, pages.source_stride, pages.source_offset, source_length),
        ("target", pages.targets, pages.target_stride, pages.target_offset, target_length),
    )
    for what, indices, stride, offset, length in sides:
        for index in (min(indices, default=0), max(indices, default=0)) if len(indices) else ():
            end = index * stride + offset + pages.page_bytes
            if index < 0 or end > length:
                raise refusal(StatusCode.OUT_OF_BOUNDS, f"{what} page {index} ends at {end} of {length} bytes")


def plan_copy(
    engine: EngineCore, region: FakeRegion, offset: int, length: int, key: FakeKey, target_offset: int, right: int
) -> list[Leg]:
    """Cut one contiguous range into requests, dealt to the rails in turn once it is long enough to be striped."""
    rails = len(engine.config.rails)
    striped = rails if length >= rails * engine.config.stripe_bytes else 1
    chunk = min(max(engine.network.request_bytes, 1), -(-length // striped) or 1)
    return [
        Leg(
            engine,
            key.owner,
            min(chunk, length - start),
            (start // chunk) % striped,
            _copy(region.base + offset + start, key, target_offset + start, min(chunk, length - start), right),
            opened=key.opened,
        )
        for start in range(0, length, chunk)
    ]


def plan_write(
    engine: EngineCore, region: FakeRegion, offset: int, length: int, key: FakeKey, target_offset: int, imm: int
) -> tuple[list[Leg], list[Leg]]:
    """Return the legs of a write and the leg that counts it: with the data where one leg carries it all, else after."""
    legs = plan_copy(engine, region, offset, length, key, target_offset, _WRITE)
    if imm < 0:
        return legs, []
    if len(legs) == 1:
        legs[0].imm = imm
        return legs, []
    move = _copy(0, key, target_offset, 0, _WRITE)
    count = Leg(engine, key.owner, move=move, imm=imm, opened=key.opened)
    return (legs, [count]) if legs else ([count], [])


def plan_read(
    engine: EngineCore, region: FakeRegion, offset: int, length: int, key: FakeKey, target_offset: int
) -> list[Leg]:
    """Return the legs of a read."""
    return plan_copy(engine, region, offset, length, key, target_offset, _READ)


def plan_pages(
    engine: EngineCore, region: FakeRegion, key: FakeKey, pages: FakePages, imm: int, right: str
) -> list[Leg]:
    """Return legs of up to 256 pages, each with a count worth its pages; `right` is what the key is used for."""
    legs = []
    for number, first in enumerate(range(0, len(pages.sources), _PAGES_PER_LEG)):
        count = min(_PAGES_PER_LEG, len(pages.sources) - first)
        move = _copy_pages(region.base, key, pages, first, first + count, ACCESS_BITS[right])
        rail = number % len(engine.config.rails)
        legs.append(Leg(engine, key.owner, count * pages.page_bytes, rail, move, imm, count, opened=key.opened))
    return legs


def plan_scatter(
    engine: EngineCore, region: FakeRegion, targets: list[tuple[FakeKey, int, int, int]], imm: int
) -> list[Leg]:
    """Return one leg per target (key, source offset, target offset, length): it moves and counts in one."""
    return [
        Leg(
            engine,
            key.owner,
            length,
            number % len(engine.config.rails),
            _copy(region.base + source, key, target, length, _WRITE),
            imm,
            opened=key.opened,
        )
        for number, (key, source, target, length) in enumerate(targets)
    ]


def _copy(local: int, key: FakeKey, offset: int, length: int, right: int) -> Callable[[EngineCore], StatusCode]:
    def move(target: EngineCore) -> StatusCode:
        if right == _READ and not target.network.can_read:
            return StatusCode.UNSUPPORTED
        code, base = target.regions.target(key, right)
        if code is StatusCode.OK and length:
            remote = base + offset
            ctypes.memmove(*((remote, local) if right == _WRITE else (local, remote)), length)
        return code

    return move


def _copy_pages(
    local: int, key: FakeKey, pages: FakePages, first: int, last: int, right: int
) -> Callable[[EngineCore], StatusCode]:
    # A copy of the lists: the caller may change its arrays as soon as the submission returned.
    sources, targets = list(pages.sources[first:last]), list(pages.targets[first:last])

    def move(target: EngineCore) -> StatusCode:
        if right == _READ and not target.network.can_read:
            return StatusCode.UNSUPPORTED
        code, base = target.regions.target(key, right)
        if code is StatusCode.OK:
            source, destination = (local, base) if right == _WRITE else (base, local)
            source_base, target_base = source + pages.source_offset, destination + pages.target_offset
            for page, place in zip(sources, targets, strict=True):
                ctypes.memmove(
                    target_base + place * pages.target_stride,
                    source_base + page * pages.source_stride,
                    pages.page_bytes,
                )
        return code

    return move
