"""A process of `bench nixl` with bare calls of `asyncfabric.blocking`: what our face adds to is measured beside it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import asyncfabric as af
from asyncfabric import blocking
from asyncfabric_services.bench.nixl.moving_worker import Lists, MovingWorker, Operation

Move = tuple[str, tuple[Any, ...], dict[str, Any]]


class NixlBareWorker(MovingWorker):
    """One fabric with one region, one peer, and one counter at each end."""

    _fabric: blocking.Fabric
    _region: blocking.Region
    _counter: blocking.ImmCounter
    _key: af.RegionKey
    _peer: af.Peer
    _imm: int

    def __init__(self, meeting: int = -1) -> None:
        """Open nothing yet."""
        super().__init__(meeting)
        self._stack = ExitStack()
        self._seen = 0

    async def do_open(self, place: dict[str, Any]) -> dict[str, Any]:
        """Make the memory, open the fabric, and register; return what the other end needs."""
        rails = self.place(place)
        self._fabric = self._stack.enter_context(blocking.open_fabric(af.FabricConfig(rails=tuple(rails))))
        self._counter = self._fabric.counter()
        self._region = self._fabric.register(self.memory if self._tensor is None else self._tensor)
        return {
            "address": bytes(self._fabric.address).hex(),
            "key": bytes(self._region.key()).hex(),
            "imm": self._counter.imm,
        }

    async def do_meet(self, address: str, key: str, imm: int) -> None:
        """Connect to the other end, whose counter has `imm`."""
        self._peer = self._fabric.connect(bytes.fromhex(address))
        self._key = af.RegionKey.from_bytes(bytes.fromhex(key))
        self._imm = imm

    def make_writes(self, operation: Operation, op_bytes: int, offsets: list[int]) -> list[Move]:
        """Return the arguments of one call for each offset."""
        parts = [(self._region[at : at + op_bytes], at) for at in offsets]
        if operation == "READ":
            return [("read", (self._key, at, part), {}) for part, at in parts]
        return [("write", (part, self._key, at), {}) for part, at in parts]

    def make_pages(self, operation: Operation, page_bytes: int, lists: Lists) -> list[Move]:
        """Return the arguments of one call for each page list."""
        how = {"page_bytes": page_bytes}
        if operation == "READ":
            return [("read_pages", (self._key, source, self._region, target), how) for source, target in lists]
        return [("write_pages", (self._region, source, self._key, target), how) for source, target in lists]

    def start(self, move: Move, note: bool) -> Any:
        """Submit a call; a read notifies by a signal when it is done."""
        name, arguments, how = move
        if note and name.startswith("write"):
            how = how | {"imm": self._imm}
        return getattr(self._fabric, name)(*arguments, **how), note and name.startswith("read")

    def ended(self, moving: Any) -> bool:
        """Return whether a transfer is done; raises its error."""
        transfer, signals = moving
        if not transfer.done:
            return False
        transfer.wait()
        if signals:
            self._fabric.signal(self._peer, self._imm)
        return True

    def notify_last(self) -> None:
        """Send the last signal."""
        self._fabric.signal(self._peer, self._imm)

    def await_answer(self) -> None:
        """Wait for one more arrival at the own counter."""
        self._seen += 1
        self._await_count()

    def _await_count(self) -> None:
        while self._counter.value < self._seen:
            self.check_patience()

    async def do_answer(self, count: int, note: bool, each: bool, worth: int) -> None:
        """Wait for the arrivals of a run, of which each move is worth so many; answer each, or the last."""
        self.be_patient()
        if note:
            for _ in range(count):
                self._seen += worth
                if each:
                    self._await_count()
                    self._fabric.signal(self._peer, self._imm)
        self._seen += 1
        self._await_count()
        self._fabric.signal(self._peer, self._imm)

    async def aclose(self) -> None:
        """Close the fabric before its memory."""
        self.drop_moves()
        self._stack.close()
        await super().aclose()
