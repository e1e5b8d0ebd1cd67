"""Soak of weights in three calls: parts are killed at random, engines join and leave, while a training publishes.

`python tests/soak/weight_soak.py --rounds 200 --joins 500 --seed 1`. Ends with status 1 at the first broken promise:
an engine that has anything but a whole version, a wait without an end, or survivors that take longer than `--bound`
seconds to go on. This process only conducts; parts are forked from one that has torch loaded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

RANKS, PARTS = 2, 4
ROWS, WIDE = 64, 32
LOST_S = 1.2  # of a StoreJoin: a part that is killed is lost after that


class Broken(Exception):
    """A promise was broken."""


# ---- the parts, each in a process of its own


def hold_store(pipe: Connection) -> None:
    from asyncfabric.weights.sessions.stores import serve_store

    store, port = serve_store("127.0.0.1", 0, 60.0)
    pipe.send({"port": port})
    pipe.recv()
    del store


def join_of(port: int) -> Any:
    from asyncfabric.weights.blocking import StoreJoin
    from asyncfabric.weights.sessions.stores import connect_store

    store = connect_store("127.0.0.1", port, 60.0)
    return StoreJoin(store, deadline_s=LOST_S)


def train(pipe: Connection, port: int, rank: int) -> None:
    import torch

    from asyncfabric import FabricConfig, FabricError
    from asyncfabric.weights.blocking import open_sender

    rows = ROWS // RANKS
    state = {f"w{number}": torch.zeros(rows, WIDE) for number in range(PARTS)}
    parts = dict.fromkeys(state, ((ROWS, WIDE), (rank * rows, 0)))
    config = FabricConfig(rails=("local",))
    with open_sender(state, join_of(port), rank=rank, ranks=RANKS, parts=parts, config=config) as sender:
        version = 0
        while not pipe.poll():
            version += 1
            for number, tensor in enumerate(state.values()):
                tensor.fill_(float(version * PARTS + number))
            try:
                report = sender.publish(version)
            except FabricError as error:
                pipe.send({"aborted": version, "why": str(error)[:200]})
                time.sleep(0.05)  # without a store each call fails at once
            else:
                assert report is not None
                pipe.send({"published": version, "at": time.monotonic()})
    os._exit(0)


def serve(pipe: Connection, port: int, name: str, half: bool) -> None:
    import torch

    from asyncfabric import ClosedError, FabricConfig
    from asyncfabric.weights.blocking import open_receiver

    kind = torch.bfloat16 if half else torch.float32
    own = {f"w{number}": torch.zeros(ROWS, WIDE, dtype=kind) for number in range(PARTS)}
    with open_receiver(own, join_of(port), name=name, config=FabricConfig(rails=("local",))) as receiver:
        pipe.send({"joined": name})
        while not pipe.poll():
            try:
                receiver.wait(0.2)
            except TimeoutError:
                continue
            except ClosedError:
                pipe.send({"closed": name, "has": receiver.version})
                break
            version = receiver.apply()
            for number, tensor in enumerate(own.values()):
                wanted = torch.tensor(float(version * PARTS + number)).to(kind)
                if not bool((tensor == wanted).all()):
                    found = f"{tensor.min():g} to {tensor.max():g}"
                    pipe.send({"torn": f"{name}: tensor {number} of version {version} has {found}"})
            pipe.send({"applied": version, "at": time.monotonic()})
    os._exit(0)


# ---- the conductor


class Part:
    """A process, and what it sent."""

    def __init__(self, context: Any, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.messages: list[dict[str, Any]] = []

    def take(self) -> None:
        try:
            while self.pipe.poll():
                self.messages.append(self.pipe.recv())
        except (EOFError, OSError):
            pass
        torn = [one["torn"] for one in self.messages if "torn" in one]
        if torn:
            raise Broken(f"not a whole version: {torn[0]}")

    def last(self, key: str) -> Any:
        return next((one[key] for one in reversed(self.messages) if key in one), None)

    def first_at(self, key: str, value: int) -> float:
        return float(next(one["at"] for one in self.messages if one.get(key, -1) >= value))

    def kill(self) -> None:
        self.process.kill()  # nothing where it has ended by itself
        self.process.join(10)
        self.pipe.close()


class WeightSoak:
    """One training and its engines, again and again."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed", "asyncfabric.weights.blocking"])
        self.dice = random.Random(arguments.seed)
        self.engines_wanted, self.patience, self.bound = arguments.engines, arguments.patience, arguments.bound
        self.seen: dict[str, Any] = {"kills": {}, "joins": 0, "go_on_s": [], "notice_s": []}
        self.parts: dict[str, Part] = {}

    def until(self, what: str, condition: Any) -> None:
        """Take messages until a condition holds."""
        limit = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() > limit:
                raise Broken(f"{what}: not within {self.patience} s; {self.standing()}")
            wait([part.pipe for part in self.parts.values() if not part.pipe.closed], 0.02)
            for part in self.parts.values():
                part.take()

    def standing(self) -> str:
        return "; ".join(f"{name}: {part.messages[-2:]}" for name, part in self.parts.items())

    def engines(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if name.startswith("engine")}

    def begin(self) -> None:
        """Start a meeting: the store, the training, the engines."""
        self.parts["store"] = Part(self.context, hold_store)
        self.until("the store", lambda: self.parts["store"].last("port"))
        self.port = self.parts["store"].last("port")
        for rank in range(RANKS):
            self.parts[f"trainer-{rank}"] = Part(self.context, train, self.port, rank)
        for number in range(self.engines_wanted):
            self.engine(f"engine-{number}")
        self.until("the first version", lambda: all(part.last("applied") for part in self.engines().values()))

    def engine(self, name: str) -> Part:
        part = self.parts[name] = Part(self.context, serve, self.port, name, int(name[-1]) % 2 == 1)
        return part

    def end(self) -> None:
        for part in self.parts.values():
            part.kill()
        self.parts.clear()

    def round(self) -> None:
        """Kill a part; survivors go on, or notice; then all is as before."""
        if not self.parts:
            self.begin()
        name = self.dice.choice([*self.parts, *[*self.engines()] * 2])
        time.sleep(self.dice.random() * 0.3)
        kind = name.partition("-")[0]
        self.seen["kills"][kind] = self.seen["kills"].get(kind, 0) + 1
        self.parts[name].kill()
        killed = time.monotonic()
        del self.parts[name]
        for part in self.parts.values():
            part.take()
        if kind == "engine":
            newest = max(part.last("applied") or 0 for part in self.engines().values()) + 2  # begun after the kill
            others = self.engines()
            self.until(
                f"survivors of {name}", lambda: all((part.last("applied") or 0) >= newest for part in others.values())
            )
            self.note("go_on_s", max(part.first_at("applied", newest) for part in others.values()) - killed)
            begun = self.engine(name)
            self.until(f"{name} anew", lambda: begun.last("applied"))
            return
        # A shard, or the place of the meeting, is gone: whoever publishes notices it, and engines keep whole versions.
        trainers = [part for one, part in self.parts.items() if one.startswith("trainer")]
        count = [len(part.messages) for part in trainers]

        def noticed() -> bool:
            return all(
                not part.process.is_alive() or any("aborted" in one for one in part.messages[before:])
                for part, before in zip(trainers, count, strict=True)
            )

        self.until(f"ranks that publish without {name}", noticed)
        self.note("notice_s", time.monotonic() - killed)
        if kind == "store":
            self.until("engines without a store", lambda: all(one.last("closed") for one in self.engines().values()))
        self.end()

    def note(self, what: str, seconds: float) -> None:
        self.seen[what].append(round(seconds, 3))
        if seconds > self.bound:
            raise Broken(f"{what}: {seconds:.2f} s, more than {self.bound}")

    def join_and_leave(self) -> None:
        """Let a guest join, take a version, and leave, in good order or not."""
        if not self.parts:
            self.begin()
        guest = self.engine(f"engine-guest{self.dice.randrange(4)}")
        self.until("a guest", lambda: guest.last("applied"))
        if self.dice.random() < 0.5:
            guest.pipe.send("leave")
            guest.process.join(self.patience)
        guest.kill()
        del self.parts[next(name for name, part in self.parts.items() if part is guest)]
        self.seen["joins"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--joins", type=int, default=10)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a wait has no end")
    parser.add_argument("--bound", type=float, default=3.0, help="seconds in which survivors go on")
    arguments = parser.parse_args()
    soak = WeightSoak(arguments)
    broken = ""
    try:
        for _ in range(arguments.joins):
            soak.join_and_leave()
        for number in range(arguments.rounds):
            soak.round()
            if number % 20 == 19:
                print(f"round {number + 1}: {soak.seen['kills']}", file=sys.stderr, flush=True)
    except Broken as error:
        broken = str(error)
    finally:
        soak.end()
    for name in ("go_on_s", "notice_s"):
        figures = sorted(soak.seen.pop(name))
        soak.seen[f"most_{name}"] = figures[-1] if figures else None
        soak.seen[f"median_{name}"] = figures[len(figures) // 2] if figures else None
    print(json.dumps(soak.seen), flush=True)
    if broken:
        sys.exit(f"BROKEN: {broken}")


if __name__ == "__main__":
    main()
