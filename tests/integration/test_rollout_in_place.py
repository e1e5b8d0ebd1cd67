"""`serve rollout --weights-memory in-place`: one copy of the weights, as the kernel counts it, and every bit is right.

rollout-1 has a shadow and keeps the old version meanwhile, rollout-2 has one copy and stops generating for each update.
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

from asyncfabric_services.demo_weights.story import free_port, torchrun_variables  # noqa: E402
from asyncfabric_services.demo_weights.verdict import Usual  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VERSION, TOKENS = "asyncfabric_rollout_version", "asyncfabric_rollout_tokens_total"
PAUSED, PAUSED_S = "asyncfabric_rollout_paused", "asyncfabric_rollout_paused_seconds"
COMMITTED, RECEIVERS = "asyncfabric_weights_committed_version", "asyncfabric_weights_receivers"
HELD_S = 3.0  # shorter than the deadline after which a node that stands still is taken for dead
MEMORY = {"rollout-1": "shadow", "rollout-2": "in-place"}


@contextmanager
def training(folder: Path, rollouts: dict[str, str], **more: str) -> Iterator[Cluster]:
    """Run a training of one rank and rollouts with such memory; the version changes after every step."""
    settings = {
        "MODEL__LAYERS": "2", "MODEL__HIDDEN": "256", "MODEL__QUERY_HEADS": "4", "MODEL__KV_HEADS": "4",
        "TRAIN__EVERY": "1", "TRAIN__CHECKPOINTS": str(folder / "checkpoints"), "WEIGHTS__RANKS": "2",
        "WEIGHTS__TP": "2", "WEIGHTS__LOG": str(folder / "decisions"),
    } | more  # fmt: skip
    with bare_cluster(folder, **settings) as made:
        made.start("coordinator")
        made.start_each({name: {"WEIGHTS__MEMORY": memory} for name, memory in rollouts.items()})
        trainer = made.service("trainer-0", made.settings, torchrun_variables(0, 1, free_port()))
        made.nodes["trainer-0"] = trainer
        made.started.append(trainer)
        trainer.hear()
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


def test_generation_waits_while_weights_are_written_in_place(tmp_path: Path) -> None:
    with training(tmp_path, MEMORY) as made:
        first, second = made["rollout-1"], made["rollout-2"]
        for node in (first, second):
            node.until(VERSION, lambda version: version >= 2)
        assert second.until(TOKENS, lambda count: count > 0) > 0, "it generates before"
        tokens, later, version = caught_waiting(made)
        assert (later, version) == (tokens, 0), "nothing is generated while the weights are written over"
        assert second.until(TOKENS, lambda count: count > later) > later, "it generates after"
        assert first.metric(PAUSED_S) == 0, "with a shadow nobody waits"
        made["coordinator"].until(COMMITTED, lambda number: number >= 6)
        made["trainer-0"].child.terminate()
        assert made["trainer-0"].ended() == 0
        last = made["coordinator"].metric(COMMITTED)
        usual = Usual(tmp_path / "checkpoints", tmp_path / "decisions")
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
        assert set(made.end("rollout-1", "rollout-2", "coordinator").values()) == {0}


def test_one_copy_is_all_that_the_kernel_sees(tmp_path: Path) -> None:
    """65 MiB of weights: after three versions there are two copies in the one process, and one in the other."""
    sizes = {"MODEL__HIDDEN": "1024", "MODEL__QUERY_HEADS": "8", "MODEL__KV_HEADS": "8"}
    with training(tmp_path, MEMORY, **sizes) as made:
        for name in MEMORY:
            made[name].until(VERSION, lambda version: version >= 3)
        made["trainer-0"].child.terminate()
        assert made["trainer-0"].ended() == 0
        ranks = {name: rows(made[name], "ranks") for name in MEMORY}
        copy_bytes = sum(row["bytes"] for row in ranks["rollout-2"])
        assert {row["copies"] for row in ranks["rollout-2"]} == {1} and copy_bytes > 32 << 20
        assert sum(row["bytes"] for row in ranks["rollout-1"]) == 2 * copy_bytes
        for name in MEMORY:
            assert made[name].metric("asyncfabric_rollout_weight_bytes") == sum(row["bytes"] for row in ranks[name])
        shared = {name: kernel_bytes(made[name], "Pss_Shmem") for name in MEMORY}
        whole = {name: kernel_bytes(made[name], "Pss_Shmem", "Pss_Anon") for name in MEMORY}
        print(f"copy {copy_bytes >> 20} MiB, shared {shared}, with anonymous memory {whole}")
        assert shared["rollout-1"] > 1.9 * copy_bytes
        assert 0.9 * copy_bytes < shared["rollout-2"] < 1.3 * copy_bytes
        assert whole["rollout-1"] - whole["rollout-2"] > 0.5 * copy_bytes, "the second copy is nowhere else either"
        assert set(made.end("rollout-1", "rollout-2", "coordinator").values()) == {0}


def test_without_a_shadow_anywhere_the_first_version_goes_on_serving(tmp_path: Path) -> None:
    """Nobody could keep the old version: such updates are refused before anybody stops, and the reason is told."""
    with training(tmp_path, {"rollout-2": "in-place"}) as made:
        second, coordinator = made["rollout-2"], made["coordinator"]
        second.until(VERSION, lambda version: version >= 1)

        def refused() -> int:
            return sum("one receiver needs a shadow" in row.get("reason", "") for row in rows(coordinator, "updates"))

        assert until(lambda: refused() >= 2, PATIENCE), rows(coordinator, "updates")
        only = second.metric(VERSION)
        assert coordinator.metric(COMMITTED) == only and second.metric(PAUSED_S) == 0
        made.start("rollout-1")  # has a shadow, fetches what serves, and keeps it from now on
        for node in (second, made["rollout-1"]):
            node.until(VERSION, lambda version: version > only)
        made["trainer-0"].child.terminate()
        assert made["trainer-0"].ended() == 0
        assert set(made.end("rollout-1", "rollout-2", "coordinator").values()) == {0}
