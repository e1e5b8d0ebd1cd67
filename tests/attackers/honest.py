"""One of two honest processes: writes to the other, judges every byte, count and message that it gets, and counts.

Talks to the siege in JSON lines: it states where it is, gets the other's address and key, and answers `look` with what
it saw so far. Begins only by `siege.py`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import trio

import asyncfabric as af

LENGTH = 256 << 10
WRITES = 4  # of a round
LATE_S = 60.0 if "ASYNCFABRIC_RXE" in os.environ else 5.0  # soft-RoCE's machine is a dozen times slower
"""For what takes a moment; an attacker that delays it so long has stopped it."""
IMM = 7
COUNTED = ("rounds", "registered", "lured", "wrong_bytes", "wrong_counts", "strange_messages", "late")


class Honest:
    """Both directions: what we write to the other, and what we judge of its writes."""

    def __init__(self, fabric: af.Fabric, seed: int) -> None:
        self.fabric = fabric
        self.seen: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.faults: list[str] = []
        self.turns = trio.Event()
        self.acknowledged = 0
        self.arrived = 0
        self.bytes = np.random.default_rng(seed).integers(0, 256, 2 * LENGTH, np.uint8)

    def pattern(self, number: int) -> Any:
        """Return the bytes of a round."""
        first = number * 8191 % LENGTH
        return self.bytes[first : first + LENGTH]

    async def write(self, source: af.Region, key: af.RegionKey, peer: af.Peer) -> None:
        """Write round after round, each when the other has judged the one before."""
        part = LENGTH // WRITES
        for number in range(1 << 40):
            memoryview(source)[:] = self.pattern(number).data
            began = time.monotonic()
            for write in range(WRITES):
                await self.fabric.write(source[write * part : (write + 1) * part], key, write * part, imm=IMM)
            while self.acknowledged <= number:
                await self.turns.wait()
            self.late("a round", began)
            self.seen["rounds"] += 1

    async def judge(self, target: af.Region, counter: af.ImmCounter, peer: af.Peer, theirs: Honest) -> None:
        """Judge round after round of the other's writes, and let it go on."""
        arrived = np.frombuffer(memoryview(target), np.uint8)
        for number in range(1 << 40):
            await counter.wait(WRITES * (number + 1))
            if counter.value != WRITES * (number + 1):
                self.seen["wrong_counts"] += 1
                self.faults.append(f"round {number} counted {counter.value} writes")
            wrong = int(np.count_nonzero(arrived != theirs.pattern(number)))
            self.seen["wrong_bytes"] += wrong
            arrived[:] = 0
            await self.fabric.send(peer, b"round %d" % number)

    async def take(self, other: int) -> None:
        """Take messages: those of the other that show it judged a round; nobody else may send any."""
        async for message in self.fabric.messages():
            if message.peer.incarnation != other or bytes(message.payload) != b"round %d" % self.acknowledged:
                self.seen["strange_messages"] += 1
                self.faults.append(f"{message.peer} sent {bytes(message.payload)[:40]!r}")
                continue
            self.acknowledged += 1
            self.turns.set()
            self.turns = trio.Event()

    async def register(self) -> None:
        """Register, revoke and release memory beside that: nobody may make it wait."""
        while True:
            began = time.monotonic()
            region = await self.fabric.allocate(4096)
            region.key(access="read-write")
            await region.revoke()
            await region.release()
            self.late("registering, revoking and releasing", began)
            self.seen["registered"] += 1
            await trio.sleep(0.05)

    async def be_lured(self, address: af.FabricAddress) -> None:
        """Try to become a peer of somebody whose address is a trap; it has no secret, so that must fail."""
        try:
            await self.fabric.connect(address)
            self.faults.append("the trap became a peer")
            self.seen["strange_messages"] += 1
        except af.FabricError:
            self.seen["lured"] += 1

    def late(self, what: str, began: float) -> None:
        """Note what took too long."""
        if (took := time.monotonic() - began) > LATE_S:
            self.seen["late"] += 1
            self.faults.append(f"{what} took {took:.1f} s")

    def look(self, other: int) -> dict[str, Any]:
        """Return what was seen, and how large this process is."""
        peers = self.fabric.statistics().peers
        strangers = [f"{one.incarnation:x}" for one in peers if one.incarnation != other and one.state == "connected"]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return dict(self.seen) | {
            "strangers": strangers,
            "faults": self.faults[-5:],
            "refused": self.fabric.statistics().messages_refused,
            "resident_bytes": pages * resource.getpagesize(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "cpu_s": time.process_time(),
        }


def report(**what: Any) -> None:
    """Print a JSON line."""
    print(json.dumps(what), flush=True)


async def main(rail: str, secret: str, seed: int) -> None:
    """Open, meet, and go on until standard input ends."""
    config = af.FabricConfig(rails=(rail,), secret=bytes.fromhex(secret), peer_deadline_host=20.0)
    lines = trio.wrap_file(sys.stdin)
    async with af.open_fabric(config) as fabric:
        target, source = await fabric.allocate(LENGTH), await fabric.allocate(LENGTH)
        np.frombuffer(memoryview(target), np.uint8)[:] = 0
        report(address=bytes(fabric.address).hex(), key=bytes(target.key(access="write")).hex())
        meet = json.loads(await lines.readline())
        address = af.FabricAddress.from_bytes(bytes.fromhex(meet["address"]))
        key = af.RegionKey.from_bytes(bytes.fromhex(meet["key"]))
        peer = await fabric.connect(address)
        ours, theirs = Honest(fabric, seed), Honest(fabric, 1 - seed)
        counter = fabric.counter(IMM)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.take, address.incarnation)
            nursery.start_soon(ours.judge, target, counter, peer, theirs)
            nursery.start_soon(ours.write, source, key, peer)
            nursery.start_soon(ours.register)
            async for line in lines:
                order, _, argument = line.strip().partition(" ")
                if order == "lure":
                    nursery.start_soon(ours.be_lured, af.FabricAddress.from_bytes(bytes.fromhex(argument)))
                else:
                    report(**ours.look(address.incarnation))
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
