"""All systems for a while: a cluster serves, a training feeds rollouts, experts answer; parts die and come back.

`make soak MINUTES=60`. Answers, versions and tokens are compared with those of one process; status 1 when one is wrong
or lost, a page stays out, or a process that lived past its warm-up holds more than 1 % more. Nodes are those of
`asyncfabric demo`; this process asks, kills and samples, on trio.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trio
from process_samples import MOST_GROWTH, Life, draw, growth_of, overlooked, read_descriptors, read_process, table

from asyncfabric.errors import BrokenError
from asyncfabric_services.demo.cluster import scenario as serving
from asyncfabric_services.demo.cluster.load import Load
from asyncfabric_services.demo.cluster.run import expected_answers
from asyncfabric_services.demo.moe import scenario as experts
from asyncfabric_services.demo.moe.one_process import right_answers
from asyncfabric_services.demo.nodes import metrics_of, open_nodes, plan_of
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.demo.weights import scenario as training
from asyncfabric_services.demo.weights.verdict import Usual
from asyncfabric_services.experts.group import open_group
from asyncfabric_services.interruption import first_failure
from asyncfabric_services.launch.local import LocalLauncher, free_port
from asyncfabric_services.launch.local_node import LocalNode
from asyncfabric_services.look.asking import NoAnswer

SAMPLE_S, LOOK_S = 5.0, 0.1
SETTLED_S = 15.0  # until nodes have connected to one that came, or have closed what belonged to one that went
SAMPLES = 36  # of the beginning and of the end, which are compared
ROUNDS_WITHOUT = 10
SMALL_CACHE = {"ASYNCFABRIC_CACHE__MEMORY": "32MiB"}  # each page is touched soon: memory does not grow by first uses
REGIONS = "asyncfabric_registered_regions"
SERVING = DemoSettings(layers=4, hidden=256, new_tokens=24)
EXPERTS = DemoSettings(layers=2, hidden=64, new_tokens=8)
TRAINING = training.Scenario(trainers=2, tp=1, layers=2, hidden=128)
NODES = 11 + experts.NODES  # directory, router, trainers, coordinator; two each of prefill, decode, rollout; experts
TRAIN_EVERY = {"ASYNCFABRIC_TRAIN__EVERY": "40"}  # a version lasts so long that it is judged by its checkpoint


class Soak:
    """One cluster with all systems; `seen` counts what happened, `broken` lists what must not."""

    def __init__(self, launcher: LocalLauncher, folder: Path, arguments: argparse.Namespace) -> None:
        self.seen: Counter[str] = Counter()
        self.broken: list[str] = []
        self.lives: dict[int, Life] = {}
        self._launcher = launcher
        self._folder = folder
        self._kill_s: float = arguments.kill_every
        self._quarter_s: float = arguments.minutes * 15
        # One after the other, here: each seeds the generator of torch, which threads share.
        self._right_answers = expected_answers(SERVING, serving.asks_of(SERVING.new_tokens))
        self._right_tokens = right_answers(EXPERTS)
        self._shown = 0
        self._there: set[int] = set()  # processes of nodes that listen, and since when these
        self._changed = 0.0
        self._back: dict[str, float] = {}  # when the last part of a system that was killed was there again
        self._directory = ""
        self._dice = random.Random(arguments.seed)
        weights = training.environment_of(TRAINING, folder) | TRAIN_EVERY
        kv = serving.environment_of(SERVING) | SMALL_CACHE
        self._began = trio.current_time()
        self._end = self._began + arguments.minutes * 60
        self._settings: Mapping[str, Mapping[str, str]] = {
            "directory": {},
            **dict.fromkeys(("router", "prefill", "decode"), kv),
            **dict.fromkeys(("trainer", "coordinator", "rollout"), weights),
            "expert": experts.environment_of(EXPERTS),
        }

    async def run(self) -> None:
        """Start everything, trouble it until the time is over, and look at what is left."""
        await self._start("directory")
        self._directory = self._launcher.running["directory"].link
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample)
            async with trio.open_nursery() as systems:
                for system in (self._serve, self._train, self._exchange, self._restart_directory):
                    systems.start_soon(system)
            nursery.cancel_scope.cancel()

    # ---- the systems

    async def _serve(self) -> None:
        """Ask, and compare every answer; one of the second nodes is killed and comes back, again and again."""
        asks = serving.asks_of(SERVING.new_tokens)
        right = self._right_answers
        await self._start("router", "prefill-1", "prefill-2", "decode-1", "decode-2")
        load = Load(self._launcher.running["router"].http, serving.MODEL, asks)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, 2)
            while self._goes_on():
                await load.until(1)
                if self._due("kv"):
                    await self._kill_and_start("kv", self._dice.choice(("decode-2", "prefill-2")))
                self._judge_answers(load, right)
            load.stop()
        self._judge_answers(load, right)
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            observed = serving.Observed()
            await serving.measure(self._launcher.running[name], observed)
            if observed.leaked_pages:
                self.broken.append(f"{observed.leaked_pages} pages of {name} are out and nobody asks")

    def _judge_answers(self, load: Load, right: Mapping[object, str]) -> None:
        outcomes, load.outcomes[:] = list(load.outcomes), []
        for outcome in outcomes:
            self.seen["answers"] += 1
            if outcome.error:
                self.broken.append(f"a request was lost after {outcome.seconds:.1f} s: {outcome.error}")
            elif outcome.text != right[outcome.ask]:
                self.broken.append(f"a wrong answer to {outcome.ask.prompt[:20]!r}: {outcome.text!r}")

    async def _train(self) -> None:
        """Train, and compare every version that a rollout served; the second one is killed and comes back."""
        port, names = free_port(), ("rollout-1", "rollout-2")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._start, "coordinator", *names)
            for rank in range(TRAINING.trainers):
                more = training.torchrun_variables(rank, TRAINING.trainers, port)
                nursery.start_soon(self._start_one, f"trainer-{rank}", more)
        for name in names:
            await training.until_metric(self._launcher.running[name], "asyncfabric_rollout_version", 1)
        usual = Usual(self._folder / "checkpoints", self._folder / "decisions")
        judged: set[tuple[int, int]] = set()
        while self._goes_on():
            for name in names:
                await self._judge_versions(self._launcher.running[name], usual, judged)
            if self._due("weights"):
                await self._kill_and_start("weights", "rollout-2")
                await training.until_metric(self._launcher.running["rollout-2"], "asyncfabric_rollout_version", 1)
            await trio.sleep(SAMPLE_S)

    async def _judge_versions(self, node: LocalNode, usual: Usual, judged: set[tuple[int, int]]) -> None:
        for row in (await training.rows_of(node, "versions"))[:-1]:  # the last one serves still
            key = (node.process.pid if node.process is not None else 0, row["version"])
            if key in judged:
                continue
            judged.add(key)
            self.seen["versions"] += 1
            if row["torn"]:
                self.broken.append(f"version {row['version']} changed while {node.name} served it")
            try:
                wrong = await trio.to_thread.run_sync(usual.wrong, row)
            except OSError:
                self.seen["versions whose checkpoint was gone"] += 1
            else:
                if wrong:
                    self.broken.append(f"version {row['version']} of {node.name} is not its checkpoint")

    async def _exchange(self) -> None:
        """Have experts answer; one is killed at half time. A group lasts as long as its nodes: all begin anew then."""
        names, half = [f"expert-{rank}" for rank in range(experts.NODES)], (self._began + self._end) / 2
        while self._goes_on():
            await self._start(*names)
            try:
                await self._conduct(names, half)
            except* BrokenError as group:
                self.broken.append(f"experts that nobody killed were lost: {first_failure(group)}")
            half = self._end
            for name in [name for name in names if name in self._launcher.running]:
                await (self._launcher.kill if self._goes_on() else self._launcher.end)(name)

    async def _conduct(self, names: list[str], kill_at: float) -> None:
        """Bring the group together and ask; from `kill_at` on without one of them, until the group has answered so."""
        (whole, fewer), prompts = self._right_tokens, experts.prompts_of()
        folder, patience = self._launcher.ipc_folder, experts.PATIENCE_S
        async with open_group(self._directory, len(names), ipc_folder=folder, patience=patience) as conductor:

            async def answer(*right: list[list[int]], departures: int = 0) -> None:
                given = await conductor.generate(prompts, EXPERTS.new_tokens)
                if len(conductor.departures) > departures:
                    raise BrokenError(conductor.departures[-1].because)
                self._judge_tokens(given, *right)
                await trio.sleep(LOOK_S)

            while self._goes_on() and trio.current_time() < kill_at:
                await answer(whole)
            if not self._goes_on():
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(answer, whole, fewer, departures=1))
                await trio.sleep(LOOK_S)
                await self._launcher.kill(names[experts.VICTIM])
            self.seen["kills"] += 1
            for _ in range(ROUNDS_WITHOUT):
                await answer(fewer, departures=1)

    def _judge_tokens(self, given: list[list[int]], *right: list[list[int]]) -> None:
        self.seen["expert answers"] += len(given)
        for number, tokens in enumerate(given):
            if tokens not in [each[number] for each in right]:
                self.broken.append(f"experts: wrong tokens for prompt {number}: {tokens}")

    async def _restart_directory(self) -> None:
        """Kill the directory once, and start it where it was."""
        await trio.sleep(self._quarter_s)
        await self._launcher.kill("directory")
        await self._start("directory")
        self.seen["directory restarts"] += 1

    # ---- what they share

    def _goes_on(self) -> bool:
        return trio.current_time() < self._end

    def _due(self, system: str) -> bool:
        """Return whether a part of a system is to be killed now: `--kill-every` seconds after the last one was back."""
        return trio.current_time() > self._back.get(system, self._began) + self._kill_s

    async def _kill_and_start(self, system: str, name: str) -> None:
        await self._launcher.kill(name)
        self.seen["kills"] += 1
        await self._start(name)
        self._back[system] = trio.current_time()

    async def _start(self, *names: str) -> None:
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self._start_one, name, {})

    async def _start_one(self, name: str, more: Mapping[str, str]) -> None:
        role = name.partition("-")[0]
        await self._launcher.start(plan_of(name, {**self._settings[role], **more}))

    async def _sample(self) -> None:
        while True:
            self._judge_ends()
            for node in list(self._launcher.running.values()):
                pid = node.process.pid if node.process is not None else 0
                try:
                    figures, opened = read_process(pid), read_descriptors(pid)
                    metrics = await metrics_of(node) if node.http else {}
                except (OSError, ValueError, NoAnswer):  # it was killed just now
                    continue
                if metrics:
                    regions = sum(metrics[name] for name in metrics if name.startswith(REGIONS))
                    figures |= {"regions": regions, "pages out": serving.pages_out(metrics)}
                    life = self.lives.setdefault(pid, Life(node.name, pid))
                    life.add(trio.current_time() - self._began, figures, opened, calm=self._calm())
            self._show()
            await trio.sleep(SAMPLE_S)

    def _calm(self) -> bool:
        """Return whether the same nodes have been there for a while, all of them."""
        nodes = self._launcher.running.values()
        there = {node.process.pid for node in nodes if node.state == "running" and node.process is not None}
        if there != self._there:
            self._there, self._changed = there, trio.current_time()
        return len(there) == NODES and trio.current_time() > self._changed + SETTLED_S

    def _judge_ends(self) -> None:
        """Nobody but this process ends nodes."""
        for node in self._launcher.running.values():
            text = f"{node.name} ended by itself, with status {node.status}"
            if node.ended.is_set() and not node.stopping.is_set() and text not in self.broken:
                self.broken.append(text)

    def _show(self) -> None:
        """Write a line each minute, so that who waits for the end sees it come."""
        minute = int((trio.current_time() - self._began) / 60)
        if minute > self._shown:
            self._shown = minute
            facts = dict(sorted(self.seen.items()))
            print(f"minute {minute}: {facts}, broken: {self.broken[-1:]}", file=sys.stderr, flush=True)


async def soaked(arguments: argparse.Namespace) -> Soak:
    """Run the soak."""
    with TemporaryDirectory(prefix="af-soak-", dir="/tmp") as folder:
        async with open_nodes({}) as launcher:
            soak = Soak(launcher, Path(folder), arguments)
            await soak.run()  # its minutes begin when the right answers are known
    return soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds from a return to the next kill")
    parser.add_argument("--warm", type=float, default=600.0, help="seconds of a process before its growth is judged")
    parser.add_argument("--output", type=Path, default=Path("build/soak"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    soak = trio.run(soaked, arguments)
    lives = [life for life in soak.lives.values() if life.times]
    growths = growth_of(lives, arguments.warm, min(SAMPLES, round(arguments.minutes * 2)))
    if arguments.minutes * 60 > 2 * arguments.warm:
        if not growths:
            soak.broken.append("nobody was judged")
        for life in overlooked(lives, growths, arguments.minutes * 40):  # two thirds of the soak
            soak.broken.append(f"{life.name} was not judged: all nodes were seldom there; a longer --kill-every?")
    grown = [one for one in growths if one.share > MOST_GROWTH]
    for one in grown:
        more = f", by {dict(one.life.opened_since(arguments.warm))}" if one.figure == "descriptors" else ""
        soak.broken.append(f"{one.figure} of {one.life.name} grew from {one.first:g} to {one.last:g}{more}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(table(growths, lives), flush=True)
    draw(lives, arguments.output / "soak.svg")
    facts = dict(sorted(soak.seen.items()))
    print(json.dumps({"minutes": round((time.monotonic() - began) / 60, 1), **facts, "broken": len(soak.broken)}))
    for text in dict.fromkeys(soak.broken):
        print(f"BROKEN: {text}", file=sys.stderr)
    sys.exit(1 if soak.broken else 0)


if __name__ == "__main__":
    main()
