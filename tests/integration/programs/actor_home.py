"""One process of the actor tests: a node with one supervised actor, over a real link; ends with its standard input.

Run as `python actor_home.py NAME FOLDER`; states `{"address": ...}` when it can be asked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from actor_messages import Add, Break, Fail, Relay, Wait, Waiting, Write  # found by the line above

import asyncfabric as af
from asyncfabric.actors import Actor, Policy, handles, open_node
from asyncfabric.control.zmq_link import LinkConfig, open_link
from asyncfabric.errors import InternalError


class Worker(Actor):
    concurrency = 4

    def __init__(self, fabric: af.Fabric) -> None:
        self.fabric = fabric
        self.log: list[str] = []

    @handles(Add)
    async def add(self, message: Add) -> int:
        return message.a + message.b

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise LookupError("no such page")

    @handles(Break)
    async def break_(self, message: Break) -> None:
        raise InternalError("broken on demand")

    @handles(Wait)
    async def wait(self, message: Wait) -> None:
        self.log.append("waiting")
        try:
            await trio.sleep_forever()
        finally:
            self.log.append("cancelled")

    @handles(Write)
    async def write(self, message: Write) -> None:
        source = await self.fabric.allocate(8 << 20)
        target = await self.fabric.allocate(8 << 20)
        key = target.key()
        self.log.append("writing")
        try:
            while True:
                await self.fabric.write(source[:], key, 0)
        finally:
            self.log.append("drained")

    @handles(Waiting)
    async def waiting(self, message: Waiting) -> list[str]:
        return [*(line.what for line in self.fabric.why()), *self.log]

    @handles(Relay)
    async def relay(self, message: Relay) -> int:
        return await message.to.ask(Add(message.a, message.b))


async def main(name: str, folder: str) -> None:
    config = LinkConfig(ipc_folder=folder)
    async with (
        af.open_fabric(af.FabricConfig(rails=("local",))) as fabric,
        open_link(name, config=config) as link,
        open_node(name, link, policy=Policy(restarts=3)) as node,
    ):
        await node.spawn(Worker, fabric, name="worker")
        print(json.dumps({"address": link.address}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


trio.run(main, *sys.argv[1:])
