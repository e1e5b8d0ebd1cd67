"""The scenario of the demo: four expert nodes answer, one is killed in the middle of an answer, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from asyncfabric_services.demo.nodes import metrics_of, open_nodes, plan_of
from asyncfabric_services.demo.prompts import jobs_of_lengths
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.experts.conductor import Departure
from asyncfabric_services.experts.group import open_group
from asyncfabric_services.launch.local import LocalLauncher
from asyncfabric_services.launch.local_node import LocalNode

NODES = 4
VICTIM = 2
"""Rank that is killed; nodes get their ranks in the order of their names."""
LENGTHS = (12, 30, 7, 50)  # tokens of the prompts
PATIENCE_S = 20.0
LOOK_S = 0.02
FORWARDS = "asyncfabric_expert_forward_forwards_total"

Reporter = Callable[[str], None]


@dataclass(slots=True)
class MoeObserved:
    """What the scenario observed.

    Attributes:
        before: answers of all nodes.
        after: answers to the same prompts, with one node killed in the middle.
        departures: who was left out, and why.
        tokens_per_s: of the first answers.
        dirty_ends: nodes that were asked to end and did not end with status 0.
    """

    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    tokens_per_s: float = 0.0
    dirty_ends: list[str] = field(default_factory=list)


def prompts_of() -> list[list[int]]:
    """Return the prompts as tokens: bytes of text."""
    return [list(job.text.encode()[:length]) for job, length in zip(jobs_of_lengths(LENGTHS), LENGTHS, strict=True)]


def environment_of(settings: DemoSettings) -> dict[str, str]:
    """Return the settings of the nodes as environment variables."""
    values = {
        "MODEL__PATH": settings.model or "",
        "MODEL__LAYERS": settings.layers,
        "MODEL__HIDDEN": settings.hidden,
        "MODEL__SEED": settings.seed,
        "MODEL__THREADS": settings.threads,
        "CLUSTER__RAILS": settings.provider,
        "LOG__LEVEL": "error",
    }
    return {f"ASYNCFABRIC_{name}": str(value) for name, value in values.items()}


async def play(settings: DemoSettings, report: Reporter) -> MoeObserved:
    """Play the scenario and return what became of it.

    Raises:
        BrokenError: a node did not start, or the others could not go on.

    Cancellation: all nodes are ended.
    """
    observed, prompts, count = MoeObserved(), prompts_of(), settings.new_tokens
    async with open_nodes(environment_of(settings)) as launcher:
        directory = await launcher.start(plan_of("directory"))
        names = [f"expert-{rank}" for rank in range(NODES)]
        async with trio.open_nursery() as starting:
            for name in names:
                starting.start_soon(launcher.start, plan_of(name))
        report(f"{NODES} expert nodes listen")
        async with open_group(directory.link, NODES, ipc_folder=launcher.ipc_folder, patience=PATIENCE_S) as conductor:
            report("they are one group; each keeps its experts")
            began = trio.current_time()
            observed.before = await conductor.generate(prompts, count)
            observed.tokens_per_s = len(prompts) * count / (trio.current_time() - began)
            report(f"answered {len(prompts)} prompts with {count} tokens each")
            victim = launcher.running[names[VICTIM]]
            done = (await metrics_of(victim))[FORWARDS]
            async with trio.open_nursery() as nursery:

                async def again() -> None:
                    observed.after = await conductor.generate(prompts, count)

                nursery.start_soon(again)
                await _until(victim, done + max(1, count // 4))
                await launcher.kill(victim.name)
                report(f"killed {victim.name} in the middle of an answer")
            observed.departures = conductor.departures
            report("the others answered all prompts without its experts")
        async with trio.open_nursery() as ending:
            for name in [name for name in names if name in launcher.running]:
                ending.start_soon(_end, launcher, name, observed)
    return observed


async def _end(launcher: LocalLauncher, name: str, observed: MoeObserved) -> None:
    if await launcher.end(name) != 0:
        observed.dirty_ends.append(name)


async def _until(node: LocalNode, forwards: float) -> None:
    """Return when a node did so many forwards."""
    while True:
        if (await metrics_of(node))[FORWARDS] >= forwards:
            return
        await trio.sleep(LOOK_S)
