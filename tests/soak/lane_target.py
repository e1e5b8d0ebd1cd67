"""The target's half of a lane: a region, a counter, and the judgement of what arrived."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import numpy as np
from lane_content import GUARD, MARGIN, POISON, VOID, Bytes, Memory, content, judge, own_memory
from lane_writer import Fault

import asyncfabric as af


class Target:
    """One region that one writer may write to."""

    def __init__(self, fabric: Any, order: dict[str, Any]) -> None:
        self.fabric, self.order = fabric, order
        self.lane: int = order["lane"]
        self.length: int = order["length"]
        self.dice = random.Random(order["seed"])
        self.void = False
        self.view: Bytes | None = None
        self.memory: Memory | None = None
        self.counter: Any = None
        self.received: Counter[int] = Counter()
        self.more = anyio.Event()

    async def open(self) -> dict[str, Any]:
        dice, size = self.dice, self.length + 2 * MARGIN
        self.memory = None if dice.random() < 0.5 else own_memory(dice, size)
        if self.memory is None:
            self.region = await self.fabric.allocate(size)
            self.view = np.frombuffer(memoryview(self.region), np.uint8)
        else:
            self.region = await self.fabric.register(self.memory.source)
            self.view = self.memory.inner
        self.view[:] = POISON
        self.inner = self.view[MARGIN : MARGIN + self.length]
        self.shelf = await self.fabric.register(content(self.lane + 1, 300_000), access="read")
        self.key = self.region[MARGIN : MARGIN + self.length].key(access="write")
        if not self.order["early"]:
            self.counter = self._counter()
        return {"key": bytes(self.key).hex(), "shelf": bytes(self.shelf.key()).hex(), "owned": self.memory is None}

    def _counter(self) -> Any:
        return self.fabric.counter(self.order["imm"])

    def receive(self, number: int) -> None:
        self.received[number] += 1
        self.more.set()
        self.more = anyio.Event()

    async def end(self, how: str) -> None:
        """Revoke or release while the writer is at it; from then on nothing lands."""
        if how == "revoke":
            await self.region.revoke()
        else:
            await self.region.release()
        self.view[:] = VOID
        self.void = True

    async def lost(self, address: str) -> dict[str, Any]:
        """Wait for more arrivals than will ever come from a peer that is lost."""
        if self.counter is None:
            self.counter = self._counter()
        try:
            peer = await self.fabric.connect(bytes.fromhex(address))
            await self.counter.wait(1 << 40, peers=[peer])
        except af.PeerError as error:
            return {"lost": str(error)}
        raise Fault("a wait for a lost peer ended well")

    async def check(self, report: dict[str, Any] | None, calm: bool) -> dict[str, Any]:
        """Judge the bytes and the counts; `report` None: the writer is gone."""
        counter = self.counter or self._counter()
        self.counter = counter
        if report is not None and calm:
            await counter.wait(report["arrivals"])
            for number, state in enumerate(report["sent"]):
                while state == "ok" and not self.received[number]:
                    await self.more.wait()
        if any(count > 1 for count in self.received.values()):
            raise Fault(f"lane {self.lane}: messages came more than once: {self.received}")
        if not self.void:
            if report is None or not calm:
                everything = [(0, self.length)]
                problem = judge(self.inner, content(self.lane, self.length), [], everything)
            else:
                problem = judge(self.inner, content(self.lane, self.length), report["sure"], report["maybe"])
            if problem:
                raise Fault(f"lane {self.lane}: {problem}")
            if not ((self.view[:MARGIN] == POISON).all() and (self.view[MARGIN + self.length :] == POISON).all()):
                raise Fault(f"lane {self.lane}: bytes beside the key's range were written")
            await self.end("revoke")
        if report is not None and counter.value > report["most"]:
            raise Fault(f"lane {self.lane}: {counter.value} arrivals of at most {report['most']}")
        return {"value": counter.value}

    async def drop(self) -> None:
        """Give everything back; what was void is void still."""
        if self.counter is not None:
            self.counter.close()
        await self.shelf.release()
        await self.region.release()
        self.look()

    def look(self) -> None:
        """Nothing may have landed since the memory was made void."""
        if self.void and not (self.view == VOID).all():
            at = int((self.view != VOID).argmax())
            raise Fault(f"lane {self.lane}: byte {at} became {self.view[at]:#x} after the keys were dead")
        if self.memory is not None and not self.memory.guarded():
            raise Fault(f"lane {self.lane}: memory beside the region was written (guard {GUARD:#x})")

    def bury(self) -> None:
        """The fabric is closed: whatever is written from now on is too late."""
        if self.view is not None:
            self.view[:] = VOID
            self.void = True
