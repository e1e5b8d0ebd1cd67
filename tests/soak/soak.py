"""Soak: processes write to each other at random while they are killed, stopped and closed; every byte is judged.

`python tests/soak/soak.py --rails local --seconds 600 --seed 1`. Ends with status 1 at the first broken promise, with
the stacks of every process where something hangs. This process only conducts: it opens no fabric.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import trio
from soak_party import Broken, Gone, Party

IMMS = 6
Begun = tuple[tuple[int, ...], bool]
"""The troubles of those who matter to a lane when it began, and whether all were calm."""


class Soak:
    """The parties, the lanes between them, and the troubles that they get."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rails: list[str] = arguments.rails.split(",")
        self.seconds, self.calmly, self.large = arguments.seconds, arguments.calm, arguments.large
        self.patience: float = arguments.patience
        self.options = {
            "peer_deadline_host": arguments.deadline,
            "peer_deadline_network": arguments.deadline,
            "drain_deadline": 3.0,
            "connect_deadline": 10.0,
        }
        self.kinds: list[str] = arguments.troubles.split(",")
        self.pace: float = arguments.pace
        self.dice = random.Random(arguments.seed)
        self.ending = False
        self.seen: Counter[str] = Counter()
        self.errors = sys.stderr
        self.parties = [Party(number, ("trio", "asyncio")[number % 2], self) for number in range(arguments.parties)]
        self.lane = 0
        self.busy: set[tuple[int, int]] = set()  # (target, imm)
        self.until = 0.0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for party in self.parties:
                nursery.start_soon(party.run)
            for party in self.parties:
                await party.born.wait()
            self.until = time.monotonic() + self.seconds
            async with trio.open_nursery() as lanes:
                for _ in range(len(self.parties) + 1):
                    lanes.start_soon(self.lanes)
                if not self.calmly:
                    lanes.start_soon(self.troubles)
                if self.large:
                    lanes.start_soon(partial(self.one_lane, length=(1 << 30) + 4099))
            self.ending = True
            for party in self.parties:
                await party.process.stdin.aclose()
        print(json.dumps(dict(sorted(self.seen.items()))), flush=True)

    async def lanes(self) -> None:
        while time.monotonic() < self.until:
            await self.one_lane()

    async def one_lane(self, length: int = 0) -> None:
        dice = self.dice
        self.lane += 2
        writer, target = dice.choice(self.parties), dice.choice(self.parties)
        # Few values, so that counters follow each other; or one never used, whose counter is opened after the arrivals.
        early = dice.random() < 0.3
        imm = IMMS + self.lane if early else dice.randrange(IMMS)
        if (target.number, imm) in self.busy:
            await trio.sleep(0.01)
            return
        self.busy.add((target.number, imm))
        begun = self._state(writer, target)
        try:
            length = length or dice.choice((1, 5000, 300_000, 4_000_000, 20_000_000))
            await self._one_lane(writer, target, imm, length, begun)
        except* Gone:
            self.seen["lanes of which a process went away"] += 1
        finally:
            self.busy.discard((target.number, imm))

    async def _one_lane(self, writer: Party, target: Party, imm: int, length: int, begun: Begun) -> None:
        dice, lane = self.dice, self.lane
        await writer.born.wait()
        await target.born.wait()
        about = {"lane": lane, "length": length, "imm": imm, "early": imm >= IMMS, "seed": dice.randrange(1 << 30)}
        life, troubles = target.address, target.troubles
        opened = await target.ask("open_lane", **about)
        if opened.get("error") == "BusyError":  # who stands still has not confirmed the end of the last one
            self.seen["counters not free yet"] += 1
            await trio.sleep(0.1)
            return None
        if "error" in opened:
            return self._error(opened, begun, writer, target)
        home = writer.address
        end = dice.choice(("", "", "", "revoke", "release"))
        report: dict[str, Any] | None = None
        reported: dict[str, Any] = {}

        async def write() -> None:
            nonlocal reported
            try:
                reported = await writer.ask(
                    "write_lane",
                    **about,
                    key=opened["key"],
                    shelf=opened["shelf"],
                    owned=opened["owned"],
                    address=life,
                    ops=dice.choice((3, 20, 100)),
                )
            except Gone:
                reported = {"gone": True}

        ended: dict[str, Any] = {}
        async with trio.open_nursery() as both:
            both.start_soon(write)
            if end:
                await trio.sleep(dice.random() * 0.2)
                ended = await target.ask("end_lane", lane=lane, how=end)
        calm = begun == (self._state(writer, target)[0], True)
        if "error" in ended:
            return self._error(ended, begun, writer, target)
        if "error" in reported and not end:
            self._error(reported, begun, writer, target)
        if "ops" in reported:
            report = {name: reported[name] for name in ("sure", "maybe", "arrivals", "most", "sent")}
            self.seen["transfers"] += reported["ops"]
            self.seen["cancelled"] += reported["cancelled"]
            self.seen["bytes"] += reported["bytes"]
            for error in reported["errors"]:
                self.seen[f"{'calm ' if calm else ''}{end} {error.split(': ')[1]}"] += 1
                # Over tcp a refused write ends the connection: what was behind it fails with that, of other lanes too.
                refused = (end and "StaleKeyError" in error) or (
                    (end or "tcp" in self.rails) and "TransferError" in error
                )
                if calm and not refused:
                    raise Broken(f"lane {lane} ({end}) from {writer.number} to {target.number}, in no trouble: {error}")
        checked = await target.ask("check_lane", lane=lane, report=report, calm=calm and not end)
        if "error" in checked:
            return self._error(checked, begun, writer, target)
        if "gone" in reported and writer.address != home and writer is not target and target.troubles == troubles:
            lost = await target.ask("await_loss", lane=lane, address=home)
            self.seen["losses reported" if "lost" in lost else "losses reported otherwise"] += 1
        dropped = await target.ask("drop_lane", lane=lane)
        if "error" in dropped:
            return self._error(dropped, begun, writer, target)
        self.seen[f"lanes{' in calm' if calm else ''}"] += 1
        return None

    def _state(self, writer: Party, target: Party) -> Begun:
        """Return the troubles so far of those who matter to a lane, and whether all are calm.

        A tcp rail asks all who connected to it whether their writes have ended: one who stands still holds up all.
        """
        who = self.parties if "tcp" in self.rails else [writer, target]
        return tuple(party.troubles for party in who), all(party.calm() for party in who)

    def _error(self, reported: dict[str, Any], begun: Begun, writer: Party, target: Party) -> None:
        calm = begun == (self._state(writer, target)[0], True)
        self.seen[f"{'calm ' if calm else ''}{reported['error']}"] += 1
        if calm:
            raise Broken(f"from {writer.number} to {target.number}, in no trouble: {reported}")

    async def troubles(self) -> None:
        dice = self.dice
        await trio.sleep(1)
        while time.monotonic() < self.until:
            await trio.sleep(dice.random() * self.pace)
            party = dice.choice(self.parties)
            await party.born.wait()
            what = dice.choice(self.kinds)
            self.seen[f"trouble: {what}"] += 1
            party.trouble()
            if what == "kill":
                party.born = trio.Event()
                party.killed = True
                party.process.send_signal(signal.SIGKILL)
            elif what == "stop":
                party.stopped = True
                party.process.send_signal(signal.SIGSTOP)
                await trio.sleep(dice.choice((0.05, 0.5, 1.5 * self.options["peer_deadline_host"])))
                party.process.send_signal(signal.SIGCONT)
                party.stopped = False
                party.trouble()
            else:
                party.born = trio.Event()
                await party.send(id=0, do="reopen", how=what)

    async def dump(self, text: str) -> None:
        """Print what hangs, with what each fabric waits for and the stacks of each process."""
        print(f"HANG: {text}", file=sys.stderr, flush=True)
        for party in self.parties:
            party.process.send_signal(signal.SIGUSR1)
            await trio.sleep(1)
        if not self.ending:
            self.ending = True
            with trio.move_on_after(5):
                for party in self.parties:
                    self.patience = 2
                    print(party.number, json.dumps(await party.ask("about"), indent=1), file=sys.stderr, flush=True)
        for party in self.parties:
            stacks = ["gdb", "-p", str(party.process.pid), "-batch", "-ex", "thread apply all bt 12"]
            found = await trio.run_process(stacks, capture_stdout=True, capture_stderr=True, check=False)
            print(found.stdout.decode(errors="replace"), file=sys.stderr, flush=True)
        raise Broken(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random transfers between processes in trouble, every byte judged.")
    parser.add_argument("--rails", default="local", help="rails of every process, joined by commas")
    parser.add_argument("--parties", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=2.0, help="of silent peers, seconds")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a process is taken to hang")
    parser.add_argument("--pace", type=float, default=6.0, help="most seconds between two troubles")
    parser.add_argument("--troubles", default="kill,stop,stop,aclose,cancel,raise")
    parser.add_argument("--calm", action="store_true", help="kill, stop and close nobody")
    parser.add_argument("--large", action="store_true", help="one lane of more than 1 GiB too")
    soak = Soak(parser.parse_args())
    try:
        trio.run(soak.run)
    except* Broken as broken:
        error: BaseException = broken
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print(f"BROKEN: {error}", dict(soak.seen), file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
