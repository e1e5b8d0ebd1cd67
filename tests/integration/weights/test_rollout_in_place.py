"""`serve rollout --weights-memory in-place`: one copy of the weights, as the kernel counts it, and every bit is right.

rollout-1 has a shadow and keeps the old version meanwhile, rollout-2 has one copy and stops generating for each update.
One training shows all of it, one thing after the other.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "transformers", "hypercorn", "safetensors"):
    pytest.importorskip(needed, reason=f"the services need {needed}")

from cluster import PATIENCE, Cluster, Service, bare_cluster  # noqa: E402

from asyncfabric_services.demo.weights.scenario import free_port, torchrun_variables  # noqa: E402
from asyncfabric_services.demo.weights.verdict import Usual  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VERSION, TOKENS = "asyncfabric_rollout_version", "asyncfabric_rollout_tokens_total"
PAUSED, PAUSED_S = "asyncfabric_rollout_paused", "asyncfabric_rollout_paused_seconds"
COMMITTED, RECEIVERS = "asyncfabric_weights_committed_version", "asyncfabric_weights_receivers"
HELD_S = 3.0  # shorter than the deadline after which a node that stands still is taken for dead
MEMORY = {"rollout-1": "shadow", "rollout-2": "in-place"}
WIDTH = "768"  # 37 MiB of weights: several times what processes that do the same differ by


def start_rollout(made: Cluster, name: str) -> None:
    made.start(name, WEIGHTS__MEMORY=MEMORY[name])


@contextmanager
def training(folder: Path) -> Iterator[Cluster]:
    """Run a training of one rank and rollout-2; the version changes after every step."""
    settings = {
        "MODEL__LAYERS": "2",
        "MODEL__HIDDEN": WIDTH,
        "MODEL__QUERY_HEADS": "4",
        "MODEL__KV_HEADS": "4",
        "TRAIN__EVERY": "1",
        "TRAIN__CHECKPOINTS": str(folder / "checkpoints"),
        "WEIGHTS__RANKS": "2",
        "WEIGHTS__TP": "2",
        "WEIGHTS__LOG": str(folder / "decisions"),
    }
    with bare_cluster(folder, **settings) as made:
        made.start("coordinator")
        start_rollout(made, "rollout-2")
        trainer = made.service("trainer-0", made.settings, torchrun_variables(0, 1, free_port()))
        made.nodes["trainer-0"] = trainer
        made.started.append(trainer)
        trainer.receive()
        yield made


def rows(node: Service, page: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(node.get(f"/{page}"))[page]
    return found


def kernel_bytes(node: Service, *fields: str) -> int:
    """Return memory of a process that is in RAM, as the kernel counts it: a page once, however often it is mapped."""
    lines = Path(f"/proc/{node.child.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.partition(":")[0] in fields)


def until(accepted: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not accepted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def caught_waiting(made: Cluster) -> tuple[float, float, float]:
    """Hold up an update in the middle; returns tokens of the one in place at its beginning and later, and its version.

    rollout-1 is made to stand still, so nothing is decided. When it is taken for dead, on a machine that is too slow,
    the update goes on without it: then nothing was seen, and it is tried again.
    """
    first, second = made["rollout-1"], made["rollout-2"]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before = made["coordinator"].metric(COMMITTED), made["coordinator"].metric(RECEIVERS)
        begun = time.monotonic()
        os.kill(first.child.pid, signal.SIGSTOP)
        try:
            found: list[tuple[float, float, float]] = []
            if until(lambda: second.metric(PAUSED) == 1, HELD_S / 2):
                tokens = second.metric(TOKENS)
                until(lambda: False, max(0.0, HELD_S - (time.monotonic() - begun)))
                found.append((tokens, second.metric(TOKENS), second.metric(VERSION)))
                (line,) = rows(second, "why")
                assert line["what"] == "generation" and line["for_s"] > 0, line
                (asked, *_) = rows(made["trainer-0"], "why")  # for whatever rollout-1 did not do yet
                assert asked["what"] == "the version" and 0 < asked["for_s"] < PATIENCE, asked
        finally:
            os.kill(first.child.pid, signal.SIGCONT)
        still = made["coordinator"].metric(COMMITTED), made["coordinator"].metric(RECEIVERS)
        if found and still[1] == before[1] and second.metric(PAUSED_S) > 0 and time.monotonic() - begun < HELD_S + 1.5:
            return found[0]
        made["coordinator"].until(RECEIVERS, before[1].__eq__)
    raise AssertionError("no update was caught under way")


def refused(made: Cluster) -> int:
    updates = rows(made["coordinator"], "updates")
    return sum("one receiver needs a shadow" in row.get("reason", "") for row in updates)


def without_a_shadow_anywhere_the_first_version_goes_on_serving(made: Cluster) -> None:
    """Nobody could keep the old version: such updates are refused before anybody stops, and the reason is reported."""
    second, coordinator = made["rollout-2"], made["coordinator"]
    second.until(VERSION, lambda version: version >= 1)
    assert until(lambda: refused(made) >= 2, PATIENCE), rows(coordinator, "updates")
    only = second.metric(VERSION)
    assert coordinator.metric(COMMITTED) == only and second.metric(PAUSED_S) == 0
    start_rollout(made, "rollout-1")  # has a shadow, fetches what serves, and keeps it from now on
    for name in MEMORY:
        made[name].until(VERSION, lambda version: version > only)


def generation_waits_while_weights_are_written_in_place(made: Cluster) -> None:
    first, second = made["rollout-1"], made["rollout-2"]
    assert second.until(TOKENS, lambda count: count > 0) > 0, "it generates before"
    tokens, later, version = caught_waiting(made)
    assert (later, version) == (tokens, 0), "nothing is generated while the weights are written over"
    assert second.until(TOKENS, lambda count: count > later) > later, "it generates after"
    assert first.metric(PAUSED_S) == 0, "with a shadow nobody waits"
    now = made["coordinator"].metric(COMMITTED)
    made["coordinator"].until(COMMITTED, lambda number: number > now)


def what_served_was_right(made: Cluster) -> None:
    """After the training has ended."""
    first, second = made["rollout-1"], made["rollout-2"]
    last = made["coordinator"].metric(COMMITTED)
    usual = Usual(made.folder / "checkpoints", made.folder / "decisions")
    for node in (first, second):
        node.until(VERSION, lambda number: number == last)
        served = rows(node, "versions")
        assert [row["version"] for row in served if row["torn"]] == []
        judged = [row for row in served if row["version"] in usual.kept()]
        assert judged[-1]["version"] == last
        assert [row["version"] for row in judged if usual.wrong(row)] == [], "logits are those of the usual loading"
    pauses = [row["paused_s"] for row in rows(second, "versions")]
    assert pauses[0] == 0 and min(pauses[1:]) > 0 and max(pauses) > HELD_S / 4
    assert abs(sum(pauses) - second.metric(PAUSED_S)) < 1e-3
    assert {row["paused_s"] for row in rows(first, "versions")} == {0.0}


def one_copy_is_all_that_the_kernel_sees(made: Cluster) -> None:
    """There are two copies in the one process and one in the other: three together."""
    ranks = {name: rows(made[name], "ranks") for name in MEMORY}
    copy_bytes = sum(row["bytes"] for row in ranks["rollout-2"])
    assert {row["copies"] for row in ranks["rollout-2"]} == {1} and copy_bytes > 12 << 20
    assert sum(row["bytes"] for row in ranks["rollout-1"]) == 2 * copy_bytes
    for name in MEMORY:
        assert made[name].metric("asyncfabric_rollout_weight_bytes") == sum(row["bytes"] for row in ranks[name])
    shared = {name: kernel_bytes(made[name], "Pss_Shmem") for name in MEMORY}  # half of what both have mapped
    anonymous = {name: kernel_bytes(made[name], "Pss_Anon") for name in MEMORY}
    print(f"copy {copy_bytes >> 10} KiB, shared {shared}, anonymous {anonymous}")
    assert 2.9 * copy_bytes < sum(shared.values()) < 3.3 * copy_bytes
    assert anonymous["rollout-2"] - anonymous["rollout-1"] < 0.5 * copy_bytes, "the second copy is nowhere else either"


def test_weights_are_written_in_place_beside_a_shadow(tmp_path: Path) -> None:
    with training(tmp_path) as made:
        without_a_shadow_anywhere_the_first_version_goes_on_serving(made)
        generation_waits_while_weights_are_written_in_place(made)
        made["trainer-0"].child.terminate()
        assert made["trainer-0"].ended() == 0
        what_served_was_right(made)
        one_copy_is_all_that_the_kernel_sees(made)
        assert set(made.end("rollout-1", "rollout-2", "coordinator").values()) == {0}
