"""Forks with open fabrics and has the child open its own; prints what became of both. `python forked_anew.py RAIL`."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys

import asyncfabric as af

DEADLINE_S = 30.0


async def exchange(rail: str) -> None:
    config = af.FabricConfig(rails=(rail,))
    async with af.open_fabric(config) as target, af.open_fabric(config) as writer:
        inbox, outbox, counter = await target.allocate(4096), await writer.allocate(4096), target.counter()
        await writer.connect(target.address)
        await writer.write(outbox[0:64], inbox.key(access="write"), 0, imm=counter.imm)
        await asyncio.wait_for(counter.wait(1), DEADLINE_S)


def child(rail: str) -> None:
    asyncio.run(exchange(rail))


async def main(rail: str) -> None:
    config = af.FabricConfig(rails=(rail,))
    async with af.open_fabric(config) as target, af.open_fabric(config) as writer:
        peer = await writer.connect(target.address)
        process = multiprocessing.get_context("fork").Process(target=child, args=(rail,))
        process.start()
        await asyncio.to_thread(process.join, DEADLINE_S)
        process.kill()
        counter = target.counter()
        await writer.signal(peer, imm=counter.imm)
        await asyncio.wait_for(counter.wait(1), DEADLINE_S)
        print(json.dumps({"child": process.exitcode, "arrived": counter.value}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
