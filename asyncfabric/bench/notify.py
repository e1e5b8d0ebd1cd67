"""Notification workloads: ping-pong with `spin` and with `await`, a write seen by a spinning process, idling.

Each function is one end; both ends are started with the same `count`. `base` is what the own counter had before. Times
come from CLOCK_MONOTONIC, which all processes of one host share, so that stamps of two ends can be subtracted.
"""

from __future__ import annotations

import os
import resource
import time

import trio

from asyncfabric import Fabric, ImmCounter, Peer, Region, RegionKey

ROUND_DEADLINE_S = 10.0
"""A round that takes longer is a hang, not a slow round."""

DRAIN_EVERY = 256
"""Rounds of a spinning loop after which the event loop collects what was completed meanwhile; never inside a sample."""


async def ping_spin(fabric: Fabric, peer: Peer, imm: int, counter: ImmCounter, base: int, count: int) -> list[int]:
    """Signal and spin for the answer `count` times; return one round trip in nanoseconds each.

    Cancellation: is seen between blocks of rounds.
    """
    samples = []
    for turn in range(1, count + 1):
        before = time.perf_counter_ns()
        fabric.signal(peer, imm)
        counter.spin(base + turn, ROUND_DEADLINE_S)
        samples.append(time.perf_counter_ns() - before)
        if turn % DRAIN_EVERY == 0:
            await trio.lowlevel.checkpoint()
    return samples


async def pong_spin(fabric: Fabric, peer: Peer, imm: int, counter: ImmCounter, base: int, count: int) -> None:
    """Answer `ping_spin`.

    Cancellation: is seen between blocks of rounds.
    """
    for turn in range(1, count + 1):
        counter.spin(base + turn, ROUND_DEADLINE_S)
        fabric.signal(peer, imm)
        if turn % DRAIN_EVERY == 0:
            await trio.lowlevel.checkpoint()


async def ping_await(fabric: Fabric, peer: Peer, imm: int, counter: ImmCounter, base: int, count: int) -> list[int]:
    """Signal and await the answer `count` times; return one round trip in nanoseconds each.

    Cancellation: ends between two rounds, or while waiting for an answer.
    """
    samples = []
    for turn in range(1, count + 1):
        before = time.perf_counter_ns()
        fabric.signal(peer, imm)
        await counter.wait(base + turn)
        samples.append(time.perf_counter_ns() - before)
    return samples


async def pong_await(fabric: Fabric, peer: Peer, imm: int, counter: ImmCounter, base: int, count: int) -> None:
    """Answer `ping_await`.

    Cancellation: ends between two rounds, or while waiting for a ping.
    """
    for turn in range(1, count + 1):
        await counter.wait(base + turn)
        fabric.signal(peer, imm)


async def write_seen(
    fabric: Fabric, region: Region, key: RegionKey, imm: int, counter: ImmCounter, base: int, op_bytes: int, count: int
) -> list[int]:
    """Write once and spin for the other end's acknowledgement, `count` times; return the stamp before each write.

    Cancellation: is seen between blocks of rounds.
    """
    source = region[0:op_bytes]
    stamps = []
    for turn in range(1, count + 1):
        stamps.append(time.monotonic_ns())
        fabric.write(source, key, 0, imm=imm)
        counter.spin(base + turn, ROUND_DEADLINE_S)
        if turn % DRAIN_EVERY == 0:
            await trio.lowlevel.checkpoint()
    return stamps


async def see_write(fabric: Fabric, peer: Peer, imm: int, counter: ImmCounter, base: int, count: int) -> list[int]:
    """Spin for each write of `write_seen` and acknowledge it; return the stamp after each one was seen.

    Cancellation: is seen between blocks of rounds.
    """
    stamps = []
    for turn in range(1, count + 1):
        counter.spin(base + turn, ROUND_DEADLINE_S)
        stamps.append(time.monotonic_ns())
        fabric.signal(peer, imm)
        if turn % DRAIN_EVERY == 0:
            await trio.lowlevel.checkpoint()
    return stamps


async def ping_bare(out: int, into: int, count: int) -> list[int]:
    """Play ping over two eventfds with nothing but trio: what an event loop itself charges for waking somebody.

    Cancellation: ends while waiting for an answer.
    """
    samples = []
    for _ in range(count):
        before = time.perf_counter_ns()
        os.eventfd_write(out, 1)
        await trio.lowlevel.wait_readable(into)
        os.eventfd_read(into)
        samples.append(time.perf_counter_ns() - before)
    return samples


async def pong_bare(out: int, into: int, count: int) -> None:
    """Answer `ping_bare`.

    Cancellation: ends while waiting for a ping.
    """
    for _ in range(count):
        await trio.lowlevel.wait_readable(into)
        os.eventfd_read(into)
        os.eventfd_write(out, 1)


async def idle_share(seconds: float) -> float:
    """Do nothing for `seconds` and return which share of a core this process used meanwhile, all threads together.

    Cancellation: ends the nap.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    await trio.sleep(seconds)
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / elapsed
