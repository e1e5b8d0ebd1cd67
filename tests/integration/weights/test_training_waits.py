"""A trainer rank stands still: the other rank, and the coordinator, show by /why whom they wait for, and since when."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "transformers", "hypercorn", "safetensors"):
    pytest.importorskip(needed, reason=f"the services need {needed}")

from cluster import PATIENCE, Service, bare_cluster  # noqa: E402

from asyncfabric_services.demo.weights.scenario import free_port, torchrun_variables  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINERS = ("trainer-0", "trainer-1")
COMMITTED = "asyncfabric_weights_committed_version"


def line_of(node: Service, what: str, accepted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until a node's /why has such a line, and return it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        lines: list[dict[str, Any]] = json.loads(node.get("/why"))["why"]
        if found := [line for line in lines if line["what"] == what and accepted(line)]:
            return found[0]
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)


def test_who_waits_for_a_rank_that_stands_still_reports_it(tmp_path: Path) -> None:
    settings = {
        "MODEL__LAYERS": "1",
        "MODEL__HIDDEN": "128",
        "MODEL__QUERY_HEADS": "2",
        "MODEL__KV_HEADS": "2",
        "TRAIN__EVERY": "1",
        "WEIGHTS__LOG": str(tmp_path / "decisions"),
    }
    with bare_cluster(tmp_path, **settings) as made:
        made.start("coordinator")
        made.start("rollout-1")
        port = free_port()
        for rank, name in enumerate(TRAINERS):
            made.nodes[name] = made.service(name, made.settings, torchrun_variables(rank, len(TRAINERS), port))
            made.started.append(made.nodes[name])
        for name in TRAINERS:
            made[name].receive()
        made["coordinator"].until(COMMITTED, lambda version: version >= 2)
        os.kill(made["trainer-1"].child.pid, signal.SIGSTOP)
        try:
            line = line_of(made["coordinator"], "the next update", lambda line: True)
            assert (line["have"], line["need"], line["missing_from"]) == (1, 2, ["trainer-1"]), line
            line = line_of(made["trainer-0"], "the training", lambda line: line["for_s"] > 1)
            assert line["missing_from"] == ["trainer-1"] and line["waits_for"].startswith("step "), line
        finally:
            os.kill(made["trainer-1"].child.pid, signal.SIGCONT)
