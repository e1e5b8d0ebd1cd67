"""Rounds of kill -9 at random moments of any process of a cluster under load; after each round nothing is left over.

The cluster stays, only the killed process starts again under its name. ASYNCFABRIC_TEST_ROUNDS and
ASYNCFABRIC_TEST_SEED state how many rounds and which moments; ASYNCFABRIC_TEST_WATCHDOG_S has to be larger for many.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

for needed in ("torch", "transformers", "openai", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

from cluster import Cluster, OneProcess, cluster  # noqa: E402
from crowd import Ask, Crowd, Outcome, crowd  # noqa: E402

ROUNDS = int(os.environ.get("ASYNCFABRIC_TEST_ROUNDS", "2"))
SEED = int(os.environ.get("ASYNCFABRIC_TEST_SEED", "0")) or time.time_ns() % 1_000_000
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
ROLES = ("prefill", "decode", "router", "directory")
SERVES = {"prefill": "asyncfabric_kv_sent_bytes_total", "decode": "asyncfabric_runner_pass_requests_count"}
SENTENCE = "A page is written once, and read by whom it was written for. "
MOST_PIECES = 60  # come between the beginning of a round and its kill
MORE_DESCRIPTORS = 16  # than after the first round: connections come and go, but not one more for each kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 + 60 * ROUNDS)]


def asks() -> list[Ask]:
    one_process = OneProcess()
    shapes = [(index, 1 + index * 5 % 23, 8 + index * 17 % 60) for index in range(10)]
    prompts = [(f"{index}: {SENTENCE * sentences}", tokens) for index, sentences, tokens in shapes]
    return [Ask(prompt, tokens, one_process.complete(prompt, tokens)) for prompt, tokens in prompts]


def victims(chance: random.Random) -> list[str]:
    """Return whom the rounds kill: every role equally often, in random order."""
    roles = [role for _ in range(-(-ROUNDS // len(ROLES))) for role in chance.sample(ROLES, len(ROLES))]
    return [chance.choice([name for name in WORKERS if name.startswith(role)] or [role]) for role in roles[:ROUNDS]]


def kill(made: Cluster, clients: Crowd, victim: str, chance: random.Random) -> None:
    """Kill at a random moment of the load."""
    clients.go_on()
    clients.until_more(chance.randrange(1, MOST_PIECES))
    time.sleep(chance.random() / 20)  # any moment, not only those at which a piece has come
    if victim == "router":
        clients.turn_to(None)
    made[victim].kill()


def start_again(made: Cluster, clients: Crowd, victim: str, place: dict[str, str]) -> None:
    """Start the killed process under its name; returns when it serves, nobody else having been notified."""
    made.start(victim, **(place if victim == "directory" else {}))
    clients.turn_to(made["router"])
    made.until_routed(prefill=2, decode=2)
    made["directory"].until("asyncfabric_directory_nodes", lambda nodes: nodes == 5)
    role = victim.partition("-")[0]
    if role in SERVES:
        made[victim].until(SERVES[role], lambda work: work > 0)
    else:
        clients.until_more(1)


def nothing_is_left_over(made: Cluster) -> None:
    """Nobody asks: every page, place and request is given back."""
    made["router"].until("asyncfabric_router_inside_requests", lambda inside: inside == 0)
    for name in WORKERS:
        made[name].until_no_page_is_out()
    for name in ("decode-1", "decode-2"):
        made[name].until("asyncfabric_runner_running_requests", lambda running: running == 0)


def descriptors(made: Cluster) -> dict[str, int]:
    """Return how many descriptors each worker and the directory have open; the router's come and go with clients."""
    return {name: len(os.listdir(f"/proc/{made[name].child.pid}/fd")) for name in (*WORKERS, "directory")}


def judged(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Check what clients got and count it."""
    wrong = [outcome.text for outcome in outcomes if outcome.kind == "wrong"]
    assert not wrong
    for outcome in outcomes:
        if outcome.kind == "error":
            assert "Timeout" not in outcome.text, outcome
            assert outcome.hurt, f"only the router's own death may be felt by a client: {outcome}"
    return Counter(outcome.kind for outcome in outcomes)


def reports_of(made: Cluster) -> list[str]:
    """Return the errors in the logs of all processes, those of earlier lives too."""
    lines = [line for path in made.folder.glob("*.log") for line in path.read_text().splitlines()]
    return [line for line in lines if not line.startswith("{") or json.loads(line)["level"] == "error"]


def processes_of(folder: Path) -> list[str]:
    """Return the processes that were started with settings of this folder and still are there."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended while we looked, or is somebody else's
            found += [environment.parent.name] * (str(folder).encode() in environment.read_bytes())
    return found


def test_rounds_of_sudden_death(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    place = {"CLUSTER__BIND": f"ipc://{tmp_path}/places/directory.sock"}
    order = victims(chance)
    print(f"seed {SEED}: {' '.join(order)}")
    with cluster(tmp_path, *WORKERS, directory=place) as made:
        at_first: dict[str, int] = {}
        with crowd(made["router"], asks(), clients=6, seed=SEED, leaving=0.2) as clients:
            for number, victim in enumerate(order):
                begun = time.monotonic()
                kill(made, clients, victim, chance)
                start_again(made, clients, victim, place)
                clients.hold()
                nothing_is_left_over(made)
                counted, open_now = judged(clients.outcomes), descriptors(made)
                at_first = at_first or open_now
                assert all(count <= at_first[name] + MORE_DESCRIPTORS for name, count in open_now.items()), open_now
                print(f"round {number}, {victim}: {dict(counted)}, {time.monotonic() - begun:.1f} s", flush=True)
        slowest = max(outcome.seconds for outcome in clients.outcomes)
        killed = Counter(name.partition("-")[0] for name in order)
        print(f"{dict(killed)}: {dict(judged(clients.outcomes))}, slowest client {slowest:.1f} s, {descriptors(made)}")
        assert reports_of(made) == []
        for names in (("router",), WORKERS, ("directory",)):
            assert set(made.end(*names).values()) == {0}, names
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("**/*.sock")) == []
