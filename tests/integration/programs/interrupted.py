"""Streams writes until SIGINT, overwrites the source the moment `open_fabric` was left, and prints that."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading

import trio

import asyncfabric as af

PIECE = 1 << 20
SCORCH = 0x5C


async def stream(rail: str, key_hex: str, source: bytearray) -> None:
    async with af.open_fabric(af.FabricConfig(rails=(rail,))) as fabric:
        region = await fabric.register(source, access="local")
        key = af.RegionKey.from_bytes(bytes.fromhex(key_hex))
        pending = [fabric.write(region, key, number * PIECE) for number in range(32)]
        await pending[0]
        print(json.dumps({"streaming": True}), flush=True)
        number = 0
        while True:
            await pending.pop(0)
            pending.append(fabric.write(region, key, number % 32 * PIECE))
            number += 1


def main() -> None:
    first = json.loads(sys.stdin.readline())
    source = bytearray(b"\1" * PIECE)
    try:
        trio.run(stream, first["rail"], first["key"], source)
    except BaseException as error:  # trio may wrap the interrupt in a group
        interrupts = [error]
        while isinstance(interrupts[0], BaseExceptionGroup):
            interrupts = list(interrupts[0].exceptions)
        if not isinstance(interrupts[0], KeyboardInterrupt):
            raise
    source[:] = bytes([SCORCH]) * PIECE
    threads = len(os.listdir("/proc/self/task"))
    assert threading.active_count() == 1
    print(json.dumps({"interrupted": True, "threads": threads}), flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, 9)  # die with the test
    main()
