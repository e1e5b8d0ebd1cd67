"""The proxy between hosts, without a GPU: the test does what kernels do, fabrics are real, parcels come as packed."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeGroup
from asyncfabric.moe.gpu import open_moe_cuda
from asyncfabric.moe.gpu.layout import NvlinkLayout
from asyncfabric.moe.gpu.proxy import STEP_KINDS, Kind, Notes, Proxy, imm_of, immediates

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.anyio

TOKENS, PRIVATE = 12, 5
CONFIG = MoeConfig(num_experts=4, top_k=2, hidden=64, max_tokens=TOKENS, ranks=2, private_tokens=PRIVATE, in_flight=2)
LAYOUT = NvlinkLayout(CONFIG)
BASE = 1 << 18
PATIENCE_S = 60


class Side:
    """One rank of two: its fabric and proxy, and what its kernels would do."""

    def __init__(self, fabric: af.Fabric, rank: int) -> None:
        self.fabric = fabric
        self.rank = rank
        self.words = np.zeros((2, 1 + 2 * CONFIG.in_flight), dtype=np.int32)
        self.notes = Notes(self.words, CONFIG.in_flight)
        self.came: Counter[tuple[Kind, int]] = Counter()

    async def open(self) -> None:
        """Allocate blocks and words."""
        self.regions = (
            await self.fabric.allocate(LAYOUT.block_bytes, access="local"),
            await self.fabric.allocate(LAYOUT.block_bytes, access="write"),
        )
        self.out, self.into = (np.frombuffer(region.memory, dtype=np.uint8) for region in self.regions)
        self.reported = [await self.fabric.watch().__aenter__() for _ in range(3)]

    async def join(self, other: Side) -> None:
        """Open the proxy."""
        peer = await self.fabric.connect(other.fabric.address)
        key = af.RegionKey.from_bytes(bytes(other.regions[1].key()))
        peers, keys = {other.rank: peer}, {other.rank: key}
        self.proxy = Proxy(self.fabric, LAYOUT, self.rank, BASE, peers, keys, self.regions, self.reported, self.notes)

    def send(self, which: int, value: int) -> None:
        """Store to a watch word as a kernel does: nothing is woken."""
        ctypes.c_uint64.from_address(self.reported[which].address).value = value

    def pack(self, step: int, rows: int) -> bytes:
        """Pack a parcel of so many rows and signal it; returns what has to arrive."""
        begin = LAYOUT.parcel(step)
        end = begin + LAYOUT.offsets.slots + rows * LAYOUT.slot_bytes
        self.out[begin:end] = np.random.default_rng([step, self.rank]).integers(0, 256, end - begin, dtype=np.uint8)
        self.out[begin : begin + 8].view(np.uint32)[:] = (TOKENS, rows)
        self.send(0, step)
        return bytes(self.out[begin:end])

    def pack_back(self, step: int, rows: int) -> bytes:
        """Pack the sums for so many rows and signal it; returns what has to arrive."""
        begin, end = LAYOUT.back_span(step, rows)
        self.out[begin:end] = np.random.default_rng([step, 9]).integers(0, 256, end - begin, dtype=np.uint8)
        self.send(1, step)
        return bytes(self.out[begin:end])

    async def arrival(self, kind: Kind, step: int) -> None:
        """Wait for one more arrival, as a gate does."""
        turn = (step - 1) % CONFIG.in_flight
        self.came[kind, turn] += 1
        await self.proxy.counters[kind, turn, 1 - self.rank].wait(self.came[kind, turn])

    async def take(self, step: int) -> bytes:
        """Wait for a parcel; returns its routes and packed rows."""
        await self.arrival(Kind.THERE, step)
        begin = LAYOUT.parcel(step)
        rows = int(self.into[begin : begin + 8].view(np.uint32)[1])
        if rows > PRIVATE:
            await self.arrival(Kind.REST, step)
        return bytes(self.into[begin : begin + LAYOUT.offsets.slots + rows * LAYOUT.slot_bytes])

    async def take_back(self, step: int, rows: int) -> bytes:
        """Wait for the sums for so many rows."""
        await self.arrival(Kind.BACK, step)
        begin, end = LAYOUT.back_span(step, rows)
        return bytes(self.into[begin:end])

    async def until(self, what: Any) -> None:
        """Wait for a note: words are stored, not awaited."""
        while not what():  # noqa: ASYNC110
            await anyio.sleep(0.001)

    @property
    def lost(self) -> bool:
        """Whether kernels know that the other rank is lost."""
        return bool(self.words[1 - self.rank, 0])


@asynccontextmanager
async def sides(rail: str) -> AsyncIterator[tuple[Side, Side, anyio.CancelScope]]:
    """Open two ranks; the scope ends the fabric of the second."""
    config = af.FabricConfig(rails=(rail,))
    async with anyio.create_task_group() as tasks, af.open_fabric(config) as fabric:
        scope, opened, joined = anyio.CancelScope(), anyio.Event(), anyio.Event()
        both = [Side(fabric, 0)]

        async def second() -> None:
            with scope:
                async with af.open_fabric(config) as other:
                    both.append(Side(other, 1))
                    opened.set()
                    await joined.wait()
                    await both[1].proxy.run()

        tasks.start_soon(second)
        await opened.wait()
        one, two = both
        for side in both:
            await side.open()
        await one.join(two)
        await two.join(one)
        joined.set()
        tasks.start_soon(one.proxy.run)
        yield one, two, scope
        for side in both:
            await side.proxy.finish(1)


@pytest.mark.parametrize("rail", ["local", "tcp"])
async def test_parcels_arrive_whole_step_after_step(rail: str) -> None:
    rows = [12, 0, 5, 6, 1, 12, 3, 11, 7, 7]
    with anyio.fail_after(PATIENCE_S):
        async with sides(rail) as (one, two, _):
            for step, count in enumerate(rows, 1):
                there, other = one.pack(step, count), two.pack(step, TOKENS - count)
                assert await two.take(step) == there and await one.take(step) == other
                back, again = two.pack_back(step, count), one.pack_back(step, TOKENS - count)
                assert await one.take_back(step, count) == back
                assert await two.take_back(step, TOKENS - count) == again
                for side in (one, two):
                    await side.until(lambda side=side, step=step: side.notes.settled(1 - side.rank, False, step))
                    await side.until(lambda side=side, step=step: side.notes.settled(1 - side.rank, True, step))
            assert not one.lost and not two.lost


async def test_two_steps_are_under_way_at_once() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with sides("local") as (one, two, _):
            sent = [one.pack(step, 4 * step) for step in (1, 2)]
            for step in (1, 2):
                two.pack(step, 0)
            assert [await two.take(step) for step in (1, 2)] == sent
            for step in (1, 2):
                await one.take(step)
                back = two.pack_back(step, 4 * step)
                assert await one.take_back(step, 4 * step) == back


async def test_nothing_leaves_before_kernels_report_it_and_a_parcel_is_not_free_before_it_was_read() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with sides("local") as (one, two, _):
            await one.fabric.write(one.regions[0][:0], af.RegionKey.from_bytes(bytes(two.regions[1].key())), 0)
            assert not one.notes.settled(1, False, 1)
            assert all(two.proxy.counters[kind, turn, 0].value == 0 for kind in STEP_KINDS for turn in range(2))
            there = one.pack(1, TOKENS)
            await one.until(lambda: one.notes.settled(1, False, 1))
            assert list(one.words[1]) == [0, 1, 0, 0, 0]
            one.out[:] = 0
            assert await two.take(1) == there


async def test_what_kernels_reported_is_sent_before_the_proxy_ends() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with sides("tcp") as (one, two, _):
            two.pack(1, 3)
            await one.take(1)
            await one.fabric.write(one.regions[0][:0], af.RegionKey.from_bytes(bytes(two.regions[1].key())), 0)
            there, back = one.pack(1, TOKENS), one.pack_back(1, 3)
            one.send(2, 1)
            await one.proxy.finish(30)
            assert await two.take(1) == there
            two.pack_back(1, TOKENS)
            assert await two.take_back(1, 3) == back
            await two.proxy.counters[Kind.VERDICT, 0, 0].wait(1)


async def test_a_verdict_reaches_the_other_host() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with sides("local") as (one, two, _):
            one.out[:4].view(np.uint32)[0] = 1 << 7
            one.send(2, 1)
            await two.proxy.counters[Kind.VERDICT, 0, 0].wait(1)
            assert int(two.into[:4].view(np.uint32)[0]) == 1 << 7


@pytest.mark.parametrize("rail", ["local", "tcp"])
async def test_a_rank_that_goes_is_noted_for_kernels_that_wait(rail: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with sides(rail) as (one, two, scope):
            one.pack(1, 2)
            await two.take(1)
            assert not one.lost
            scope.cancel()
            await one.until(lambda: one.lost)
            assert list(one.proxy.losses) == [1] and one.proxy.losses[1]
            await one.proxy.finish(30)  # what it owes to the lost is not waited for


@pytest.mark.parametrize("hosts", [None, [0, 1]])
async def test_what_fails_beside_the_proxy_is_reported_as_it_is(hosts: list[int] | None) -> None:
    if torch.cuda.is_available():
        pytest.skip("OPENING WITHOUT A GPU WAS NOT TESTED: there is one")
    async with af.open_fabric(af.FabricConfig(rails=("local",))) as one, af.open_fabric() as two:
        group = MoeGroup(0, [one.address, two.address])
        with pytest.raises(af.DeviceError):  # no group of exceptions, although the proxy has tasks
            async with open_moe_cuda(one, group, CONFIG, device="cuda:0", hosts=hosts):
                pytest.fail("opened without a GPU")


@given(st.integers(1, 32), st.sampled_from([1, 2, 4, 16]))
def test_immediates_are_all_different_and_within_their_span(ranks: int, in_flight: int) -> None:
    found = {
        imm_of(BASE, ranks, in_flight, kind, turn, sender)
        for kind in Kind
        for turn in range(in_flight)
        for sender in range(ranks)
    }
    assert len(found) == immediates(ranks, in_flight)
    assert min(found) == BASE and max(found) == BASE + immediates(ranks, in_flight) - 1


@given(st.integers(1, 4), st.integers(0, 20))
def test_notes_are_settled_when_all_turns_of_the_last_steps_are(in_flight: int, last: int) -> None:
    notes = Notes(np.zeros((2, 1 + 2 * in_flight), dtype=np.int32), in_flight)
    for step in range(1, last + 1):
        assert not notes.settled(1, True, step)
        notes.settle(1, True, step)
        assert notes.settled(1, True, step)
        assert not notes.settled(1, False, step) and not notes.settled(0, True, step)
