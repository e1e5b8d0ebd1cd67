"""Message workloads: ping-pong with `spin` and with `await`, and as many one way as go.

Each function is one end; both ends are started with the same `count`. Stamps come from CLOCK_MONOTONIC, which all
processes of one host share. Messages carry their number, so that the receiver can check that each came once, in order.
"""

from __future__ import annotations

import time
from collections import deque

import trio

from asyncfabric import BusyError, Fabric, Peer, Transfer
from asyncfabric.bench.notify import DRAIN_EVERY, ROUND_DEADLINE_S

AWAIT_EVERY = 64
"""Of messages one way the sender awaits so many together, four such groups late: what is in flight stays bounded."""


def numbered(number: int, length_bytes: int) -> bytes:
    """Return a message of `length_bytes`, 4 or more, that carries its number."""
    return number.to_bytes(4, "little").ljust(length_bytes, b"\0")


def number_of(payload: bytes) -> int:
    """Return the number that a message carries."""
    return int.from_bytes(payload[:4], "little")


async def ping_spin(fabric: Fabric, peer: Peer, length_bytes: int, count: int) -> list[int]:
    """Send a message and spin for the answer `count` times; return one round trip in nanoseconds each.

    Cancellation: is seen between blocks of rounds.
    """
    stream, payload, samples = fabric.messages(), bytes(length_bytes), []
    for turn in range(1, count + 1):
        before = time.perf_counter_ns()
        fabric.send(peer, payload)
        stream.spin(ROUND_DEADLINE_S)
        samples.append(time.perf_counter_ns() - before)
        if turn % DRAIN_EVERY == 0:
            await trio.lowlevel.checkpoint()
    return samples


async def pong_spin(fabric: Fabric, peer: Peer, length_bytes: int, count: int) -> None:
    """Answer `ping_spin`.

    Cancellation: is seen between blocks of rounds.
    """
    stream, payload = fabric.messages(), bytes(length_bytes)
    for turn in range(1, count + 1):
        stream.spin(ROUND_DEADLINE_S)
        fabric.send(peer, payload)
        if turn % DRAIN_EVERY == 0:
            await trio.lowlevel.checkpoint()


async def ping_await(fabric: Fabric, peer: Peer, length_bytes: int, count: int) -> list[int]:
    """Send a message and await the answer `count` times; return one round trip in nanoseconds each.

    Cancellation: ends between two rounds, or while waiting for an answer.
    """
    stream, payload, samples = fabric.messages(), bytes(length_bytes), []
    for _ in range(count):
        before = time.perf_counter_ns()
        fabric.send(peer, payload)
        await anext(stream)
        samples.append(time.perf_counter_ns() - before)
    return samples


async def pong_await(fabric: Fabric, peer: Peer, length_bytes: int, count: int) -> None:
    """Answer `ping_await`.

    Cancellation: ends between two rounds, or while waiting for a ping.
    """
    stream, payload = fabric.messages(), bytes(length_bytes)
    for _ in range(count):
        await anext(stream)
        fabric.send(peer, payload)


async def send_many(fabric: Fabric, peer: Peer, length_bytes: int, count: int) -> int:
    """Send `count` numbered messages as fast as they are taken; return the stamp before the first.

    Cancellation: ends while waiting for room; what was sent stays sent.
    """
    started = time.monotonic_ns()
    ends: deque[Transfer] = deque()
    for number in range(count):
        payload = numbered(number, length_bytes)
        try:
            sent = fabric.send(peer, payload)
        except BusyError:
            await fabric.wait_writable()
            sent = fabric.send(peer, payload)
        if number % AWAIT_EVERY == 0:
            ends.append(sent)
            if len(ends) > 4:
                await ends.popleft()
    await sent
    return started


async def receive_many(fabric: Fabric, count: int) -> tuple[int, bool]:
    """Take `count` messages of `send_many` one by one; return the stamp after the last, and whether all was well.

    Cancellation: ends while waiting for a message.
    """
    stream, well = fabric.messages(), True
    for number in range(count):
        message = await anext(stream)
        well = well and number_of(message.payload) == number
    return time.monotonic_ns(), well


async def spin_many(fabric: Fabric, count: int) -> tuple[int, bool]:
    """Do the same by spinning, taking all that are there at a time.

    Cancellation: is seen when all have come.
    """
    stream, well, number = fabric.messages(), True, 0
    while number < count:
        for message in stream.spin(ROUND_DEADLINE_S):
            well = well and number_of(message.payload) == number
            number += 1
    await trio.lowlevel.checkpoint()
    return time.monotonic_ns(), well
