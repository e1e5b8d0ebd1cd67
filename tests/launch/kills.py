"""Kills nodes of a cluster under load, one after the other: `kills.py --launcher local|ray|slurm|torchrun --kills 50`.

Each node that is killed (any role) is started again by what launched it. Ends with a table and, with --json, an object.
Exit status 0: no wrong answer, and full strength after each kill. On trio.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import trio

sys.path.insert(0, str(Path(__file__).parent))

from clusters import (
    ASKS,
    LOOK_S,
    MODEL,
    NODES,
    PATIENCE_S,
    STARTERS,
    open_cluster,
    processes_of,
    right_answers,
    until_strong,
    write_file,
)

from asyncfabric_services.demo.cluster.load import Load
from asyncfabric_services.launch.launcher import Launcher

CLIENTS = 1


async def _kill(launcher: Launcher, folder: Path, victims: list[str], links: dict[str, str]) -> dict[str, str]:
    """Kill nodes at once and return the link addresses of all when the cluster is at full strength, with new ones."""
    before = {victim: processes_of(folder, victim) for victim in victims}
    assert all(before.values()), f"a node has no process: {before}"
    for process in set().union(*before.values()):
        os.kill(process, signal.SIGKILL)
    with trio.fail_after(PATIENCE_S):
        while True:
            anew = await until_strong(launcher, NODES)
            lives = {victim: processes_of(folder, victim) for victim in victims}
            moved = all(victim.startswith("directory") or anew[victim] != links[victim] for victim in victims)
            if moved and all(lives[victim] and not lives[victim] & before[victim] for victim in victims):
                return anew
            await trio.sleep(LOOK_S)


async def kill_nodes(
    launcher_name: str, kills: int, together: int, seed: int, base: Path, minutes: float = math.inf
) -> dict[str, Any]:
    """Run the cluster in a folder and kill nodes, for so many minutes at most; return what became of it."""
    expected = await trio.to_thread.run_sync(right_answers)
    file, router = write_file(base)
    folder, rng = base / "cluster", random.Random(seed)
    roles: Counter[str] = Counter()
    seconds: list[float] = []
    async with open_cluster(launcher_name, file, folder) as launcher:
        links = await until_strong(launcher, NODES)
        load = Load(router, MODEL, ASKS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, CLIENTS)
            await load.until(len(ASKS))
            end = trio.current_time() + minutes * 60
            while (left := kills - sum(roles.values())) > 0 and trio.current_time() < end:
                victims = rng.sample(sorted(links), rng.randint(1, min(together, left)))
                began = trio.current_time()
                links = await _kill(launcher, folder.resolve(), victims, links)
                seconds.append(trio.current_time() - began)
                roles.update(victim.partition("-")[0] for victim in victims)
                print(f"{sum(roles.values()):3} kills; {', '.join(victims)}: {seconds[-1]:.1f} s", file=sys.stderr)
            await load.until(len(ASKS))
            load.stop()
    whole = [outcome for outcome in load.outcomes if not outcome.error]
    return {
        "launcher": launcher_name,
        "kills": sum(roles.values()),
        "killed": dict(roles),
        "requests": len(load.outcomes),
        "answers": len(whole),
        "wrong_answers": sum(outcome.text != expected[outcome.ask] for outcome in whole),
        "failed": dict(Counter(outcome.error[:100] for outcome in load.outcomes if outcome.error)),
        "full_strength_median_s": round(statistics.median(seconds), 1) if seconds else 0.0,
        "full_strength_max_s": round(max(seconds, default=0.0), 1),
    }


@click.command()
@click.option("--launcher", type=click.Choice(tuple(STARTERS)), default="local", show_default=True)
@click.option("--kills", type=click.IntRange(0), default=50, show_default=True)
@click.option("--together", type=click.IntRange(1, NODES), default=3, show_default=True, help="At most, at once.")
@click.option("--minutes", type=float, default=math.inf, help="No kills after so many; what was done is reported.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def main(launcher: str, kills: int, together: int, minutes: float, seed: int, as_json: bool) -> None:
    """Kill nodes of a cluster under load; see the name plate."""
    with TemporaryDirectory(prefix="kills-", dir="/tmp") as base:
        found = trio.run(kill_nodes, launcher, kills, together, seed, Path(base), minutes)
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:24} {value}")
    sys.exit(0 if found["wrong_answers"] == 0 and found["kills"] == kills and found["answers"] else 1)


if __name__ == "__main__":
    main()
