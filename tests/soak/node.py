"""One process of the soak: opens a fabric, obeys orders from standard input, and opens the next one on order.

`python node.py trio|asyncio`. Each command is a JSON line with an id and runs as a task of its own; each is answered by
a line with this id. Commands that a closed fabric took with it are answered with `gone`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
from lane_target import Target
from lane_writer import Fault, Writer

import asyncfabric as af


class Reopen(Exception):
    """The fabric ends by an exception."""


def answer(**line: Any) -> None:
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)  # the soak ended without us


async def commands() -> AsyncIterator[dict[str, Any]]:
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        yield json.loads(line)


class Node:
    """What the process holds through all lives of its fabric."""

    def __init__(self) -> None:
        self.targets: dict[int, Target] = {}
        self.graves: list[Target] = []
        self.running: set[int] = set()

    async def live(self, first: dict[str, Any], orders: AsyncIterator[dict[str, Any]]) -> bool:
        """One life of a fabric; returns whether there is another."""
        config = af.FabricConfig(rails=tuple(first["rails"]), **first["options"])
        again = True
        try:
            async with af.open_fabric(config) as fabric:
                self.fabric = fabric
                answer(born=bytes(fabric.address).hex())
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self.receive)
                    async for order in orders:
                        if order["do"] == "reopen":
                            self.closing = order["id"]
                            if order["how"] == "aclose":
                                await fabric.aclose()
                            elif order["how"] == "raise":
                                raise Reopen
                            tasks.cancel_scope.cancel()
                            break
                        self.running.add(order["id"])
                        tasks.start_soon(self.obey, order)
                    else:
                        again = False
                        tasks.cancel_scope.cancel()
        except* Reopen:
            pass
        for target in self.targets.values():
            target.bury()
        self.graves += self.targets.values()
        self.targets.clear()
        for number in sorted(self.running):
            answer(id=number, gone=True)
        self.running.clear()
        return again

    async def receive(self) -> None:
        try:
            async for message in self.fabric.messages():
                lane, number = message.payload.split()
                if (target := self.targets.get(int(lane))) is not None:
                    target.receive(int(number))
        except af.ClosedError:
            pass

    async def obey(self, order: dict[str, Any]) -> None:
        number, do = order.pop("id"), order.pop("do")
        if do in ("end_lane", "check_lane", "await_loss", "drop_lane") and order["lane"] not in self.targets:
            return self.end(number, gone=True)  # it went with an earlier life
        try:
            result = await getattr(self, do)(**order)
        except* af.ClosedError as errors:
            self.end(number, error="ClosedError", text=texts(errors))
        except* Fault as errors:
            self.end(number, fault=texts(errors))
        except* (af.FabricError, ValueError) as errors:
            self.end(number, error=type(innermost(errors)).__name__, text=texts(errors))
        else:
            self.end(number, **(result or {}))

    def end(self, number: int, **result: Any) -> None:
        if number in self.running:
            self.running.discard(number)
            answer(id=number, **result)

    async def open_lane(self, **order: Any) -> dict[str, Any]:
        target = self.targets[order["lane"]] = Target(self.fabric, order)
        return await target.open()

    async def write_lane(self, **order: Any) -> dict[str, Any]:
        return await Writer(self.fabric, order).run()

    async def end_lane(self, lane: int, how: str) -> None:
        await self.targets[lane].end(how)

    async def check_lane(self, lane: int, report: dict[str, Any] | None, calm: bool) -> dict[str, Any]:
        return await self.targets[lane].check(report, calm)

    async def await_loss(self, lane: int, address: str) -> dict[str, Any]:
        return await self.targets[lane].lost(address)

    async def drop_lane(self, lane: int) -> None:
        target = self.targets.pop(lane)
        await target.drop()
        self.graves.append(target)
        for grave in self.graves:
            grave.look()
        del self.graves[:-4]

    async def about(self) -> dict[str, Any]:
        statistics = self.fabric.statistics()
        return {
            "why": self.fabric.why_text(),
            "regions": [region.length_bytes for region in self.fabric.regions()],
            "statistics": dict(statistics.counters),
            "peers": [repr(peer) for peer in statistics.peers],
        }


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def texts(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(texts(part) for part in error.exceptions)
    return f"{type(error).__name__}: {error}"


async def main() -> None:
    orders = commands()
    first = await anext(orders)
    node = Node()
    while await node.live(first, orders):
        pass
    for grave in node.graves:
        grave.look()
    answer(ended=True)


if __name__ == "__main__":
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    anyio.run(main, backend=sys.argv[1])
