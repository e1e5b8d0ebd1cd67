"""Rounds of kill -9 of any process of a training and its rollouts, at every stage of updates; after each all is whole.

After each round every rollout that is there serves exactly one version, which was decided, and whose bytes and logits
are those of its checkpoint loaded the usual way. ASYNCFABRIC_TEST_ROUNDS and ASYNCFABRIC_TEST_SEED set how many rounds
and which moments; ASYNCFABRIC_TEST_WATCHDOG_S has to be larger for many.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "transformers", "hypercorn", "safetensors"):
    pytest.importorskip(needed, reason=f"the services need {needed}")

from cluster import PATIENCE, Cluster, Service, bare_cluster  # noqa: E402

from asyncfabric_services.demo.weights.scenario import free_port, torchrun_variables  # noqa: E402
from asyncfabric_services.demo.weights.verdict import Usual  # noqa: E402

ROUNDS = int(os.environ.get("ASYNCFABRIC_TEST_ROUNDS", "1"))
SEED = int(os.environ.get("ASYNCFABRIC_TEST_SEED", "0")) or time.time_ns() % 1_000_000
ROLES = ("rollout", "trainer", "coordinator")
TRAINERS, ROLLOUTS = ("trainer-0", "trainer-1"), ("rollout-1", "rollout-2")
LONGEST_UPDATE_S = 0.6  # kills fall anywhere between two updates and in one
COMMITTED = "asyncfabric_weights_committed_version"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 90 * ROUNDS)]


def victims(chance: random.Random) -> list[str]:
    """Return whom the rounds kill: every role equally often, in random order."""
    roles = [role for _ in range(-(-ROUNDS // len(ROLES))) for role in chance.sample(ROLES, len(ROLES))]
    names = (*TRAINERS, *ROLLOUTS, "coordinator")
    return [chance.choice([name for name in names if name.startswith(role)]) for role in roles[:ROUNDS]]


def start_trainers(made: Cluster) -> None:
    """Start all ranks at once; they go on from the newest checkpoint."""
    port = free_port()
    for rank, name in enumerate(TRAINERS):
        variables = torchrun_variables(rank, len(TRAINERS), port)
        made.nodes[name] = made.service(name, made.settings, variables)
        made.started.append(made.nodes[name])


def until(wanted: Callable[[], Any], what: Callable[[], str]) -> Any:
    """Wait until something is true and return it; fails when that does not come."""
    deadline = time.monotonic() + PATIENCE
    while not (found := wanted()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)
    return found


def served(node: Service) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(node.get("/versions"))["versions"]
    return rows


def committed(made: Cluster) -> float:
    return made["coordinator"].until(COMMITTED, lambda version: version >= 0)


def kill(made: Cluster, victim: str, chance: random.Random) -> None:
    """Kill at a random moment after some update."""
    before = committed(made)
    made["coordinator"].until(COMMITTED, lambda version: version >= before + 1)
    time.sleep(chance.random() * LONGEST_UPDATE_S)  # any stage of the next updates
    made[victim].kill()


def start_again(made: Cluster, victim: str) -> None:
    """Start what was killed; ranks of a training that lost one end by themselves and start together."""
    if victim.startswith("trainer"):
        (other,) = [name for name in TRAINERS if name != victim]
        assert made[other].ended() == 1, "a rank that lost another one does not go on alone"
        stated = made[other].log.read_text()
        assert "another rank of the training is gone" in stated and "Traceback" not in stated, stated[-3000:]
        start_trainers(made)
        for name in TRAINERS:
            made[name].receive()
    else:
        made.start(victim)


def whole_again(made: Cluster, usual: Usual | None, victim: str) -> Usual:
    """Every rollout serves one version that was decided and is right; then training goes on."""
    folder = made.folder
    for name in ROLLOUTS:
        made[name].until("asyncfabric_rollout_version", lambda version: version >= 1)
        if usual is None:
            usual = Usual(folder / "checkpoints", folder / "decisions")
        rows = served(made[name])
        assert [row["version"] for row in rows] == sorted({row["version"] for row in rows}), rows
        for row in rows[-3:]:
            assert not row["torn"], (name, row)
            assert not usual.wrong(row), (name, row, victim)
    assert usual is not None
    decided = {
        record["version"]
        for line in (folder / "decisions").read_text().splitlines()
        if (record := json.loads(line)["record"])["kind"] == "commit"
    }
    for name in ROLLOUTS:
        assert {row["version"] for row in served(made[name])} <= decided, "only what is decided serves"
    now = committed(made)
    made["coordinator"].until(COMMITTED, lambda version: version > now)
    for name in ROLLOUTS:
        made[name].until("asyncfabric_rollout_version", lambda version: version > now)
    return usual


def test_rounds_of_sudden_death_of_trainers_rollouts_and_coordinator(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    order = victims(chance)
    print(f"seed {SEED}: {' '.join(order)}")
    settings = {
        "MODEL__LAYERS": "2",
        "MODEL__HIDDEN": "256",
        "MODEL__QUERY_HEADS": "4",
        "MODEL__KV_HEADS": "4",
        "TRAIN__EVERY": "1",
        "TRAIN__CHECKPOINTS": str(tmp_path / "checkpoints"),
        "WEIGHTS__RANKS": "2",
        "WEIGHTS__TP": "2",
        "WEIGHTS__FORM": "float8",
        "WEIGHTS__LOG": str(tmp_path / "decisions"),
        "WEIGHTS__CODINGS": "all",
    }
    with bare_cluster(tmp_path, **settings) as made:
        start_trainers(made)
        made.start("coordinator", *ROLLOUTS)
        for name in TRAINERS:
            made[name].receive()
        for name in ROLLOUTS:
            made[name].until("asyncfabric_rollout_version", lambda version: version >= 1)
        usual: Usual | None = None
        for number, victim in enumerate(order):
            begun = time.monotonic()
            kill(made, victim, chance)
            start_again(made, victim)
            usual = whole_again(made, usual, victim)
            spent = time.monotonic() - begun
            print(f"round {number}, {victim}: version {committed(made):g}, {spent:.1f} s", flush=True)
        outcomes = Counter(row["outcome"] for row in json.loads(made["coordinator"].get("/updates"))["updates"])
        print(f"{dict(Counter(order))}: updates of the last coordinator {dict(outcomes)}")
        made["trainer-0"].child.terminate()
        assert [made[name].ended() for name in TRAINERS] == [0, 0]
        assert set(made.end(*ROLLOUTS, "coordinator").values()) == {0}
        assert made.end("directory") == {"directory": 0}
