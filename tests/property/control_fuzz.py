"""Fuzzes what reads bytes from outside: frames, sessions, directory messages, authentication requests, addresses.

`python tests/property/control_fuzz.py [SECONDS] [SEED]` runs until the time is over and prints what it tried; the
suite runs it for a few seconds. A finding is an exception, or a table that grows without bound; its bytes are printed.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from control_world import World

from asyncfabric.control import directory_messages as dm
from asyncfabric.control import zap
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.directory import DirectoryView, Node, NodeChange
from asyncfabric.control.events import Path, Received
from asyncfabric.control.messages import Identity, Undecodable, decode
from asyncfabric.control.window import MAX_CHANNELS

ROUND = 400  # frames until a new world, so that findings are short
SPECIAL = bytes.fromhex("00 7f 80 90 91 a0 c0 c1 c4 c6 cf d3 d9 dc dd de df ff")  # heads of MessagePack values
LARGE = (b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xc6\xff\xff\xff\xff")
ME = Identity("node", 7)
NODE = Node(ME, "prefill", "ipc:///tmp/x.sock", {"zone": "b"})
BODIES = [
    dm.encode(message)
    for message in (
        dm.Register("prefill", "ipc:///tmp/x.sock", {"zone": "b"}),
        dm.Renew(),
        dm.DrainMe(),
        dm.LeaveMe(),
        dm.WatchFrom(3),
        dm.Registered(10**9),
        dm.Unregistered("unknown", True),
        dm.Snapshot(3, False, (NODE,)),
        dm.Changes((NodeChange(4, "joined", NODE), NodeChange(5, "lost", NODE, "gone"))),
        dm.Settled(),
    )
]


def mutate(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Return bytes that are nearly right."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.choice(SPECIAL)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                del out[at : at + rng.randrange(1, 9)]
            case 5:
                other = rng.choice(corpus)
                out[at:] = other[rng.randrange(len(other) + 1) :]
            case 6:
                out[at:at] = bytes([rng.choice(SPECIAL)]) * rng.choice((1, 5, 3000))  # deep nesting among others
            case _:
                out[at : at + 1] = rng.choice(LARGE)
    return bytes(out[:20_000])


class Fuzz:
    """One run: what it tried is in `tried`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tried: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Fuzz for so long, at least one round."""
        end = time.monotonic() + seconds
        while True:
            self.sessions()
            self.bodies()
            self.doors()
            if time.monotonic() >= end:
                return

    def sessions(self) -> None:
        """Feed three tables that talk to each other with nearly right frames."""
        world, rng = World(checked=False), self.rng
        world.dial(0, 1)
        world.dial(1, 2)
        corpus: list[bytes] = [b""]
        for _ in range(ROUND):
            for queue in world.waiting():
                corpus = [*corpus[-200:], *queue.frames]
                if rng.random() < 0.7:
                    world.move(queue)
            process = rng.choice(world.processes)
            paths: list[Path] = [*process.table.sessions, b"unknown"]
            frame = mutate(rng, rng.choice(corpus), corpus)
            path = rng.choice(paths)
            self.step(lambda p=process, f=frame, w=path: self.receive(world, p.number, w, f), frame)
            for peer in list(process.table.names.peers):
                if rng.random() < 0.2:
                    world.post(process.number, peer, rng.choice("xyz"), 64)
            if rng.random() < 0.05:
                world.dial(rng.randrange(3), rng.randrange(3))
            world.now_ns += rng.randrange(200_000_000)
            self.bounds(world)

    def receive(self, world: World, number: int, path: Path, frame: bytes) -> None:
        """Feed one frame, and note what it was."""
        process = world.processes[number]
        verdict = decode(frame, process.table.config.max_frame_bytes)
        self.tried[verdict.reason if isinstance(verdict, Undecodable) else type(verdict.message).__name__] += 1
        world.feed(number, Received(path, frame))

    def bounds(self, world: World) -> None:
        """What outsiders can make us remember is bounded."""
        for process in world.processes:
            table = process.table
            assert len(table.sessions) <= 4 * ROUND
            for session in table.sessions.values():
                assert len(session.receives.arrived) <= MAX_CHANNELS
            assert set(table.names._by_name) == {identity.name for identity in table.names.peers}
            table.next_deadline_ns()

    def bodies(self) -> None:
        """Decode nearly right bodies of the directory, and apply them when they are right after all."""
        view = DirectoryView()
        for _ in range(ROUND):
            body = mutate(self.rng, self.rng.choice(BODIES), BODIES)
            self.step(lambda b=body: dm.decode_request(b), body)
            news = self.step(lambda b=body: dm.decode_news(b), body)
            self.tried["body" if news is not None else "no body"] += 1
            if isinstance(news, dm.Changes):
                self.step(lambda n=news: view.apply(n.changes), body)
            elif isinstance(news, dm.Snapshot):
                self.step(lambda n=news: view.replace(n.epoch, n.nodes, settled=n.settled), body)

    def doors(self) -> None:
        """Requests of authentication, monitor events, addresses."""
        good = [b"1.0", b"1", b"asyncfabric", b"127.0.0.1", b"", b"CURVE", b"k" * 32]
        for _ in range(ROUND // 4):
            request = [mutate(self.rng, part, good) if self.rng.random() < 0.3 else part for part in good]
            del request[self.rng.randrange(len(request) + 1) :]
            verdict = self.step(lambda r=request: zap.judge(r, frozenset(["00" * 32])), b"|".join(request))
            assert verdict.refused and verdict.answer[2] == b"400", "let in somebody who is not trusted"
            self.step(lambda r=request: zap.monitor_event(r), b"|".join(request))
            text = mutate(self.rng, b"tcp://127.0.0.1:1#curve=" + b"0f" * 32, good).decode("utf-8", "replace")
            try:
                assert str(LinkAddress.parse(text)) == text
            except ValueError:
                self.tried["no address"] += 1

    def step(self, call: Callable[[], object], data: bytes) -> object:
        """Call, and report the bytes when it raises."""
        try:
            return call()
        except Exception:
            print(f"finding: {data.hex()}", file=sys.stderr)
            raise


def main(seconds: float, seed: int) -> Counter[str]:
    """Fuzz and return what was tried."""
    logging.getLogger("asyncfabric.control").setLevel(logging.CRITICAL)
    fuzz = Fuzz(seed)
    print(f"seed {seed}", file=sys.stderr)
    fuzz.run(seconds)
    return fuzz.tried


if __name__ == "__main__":
    result = main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    print(sum(result.values()), "inputs, no finding:", dict(result.most_common()))
