"""Starts the process that imports vLLM once; engines are forked from it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes import OURS, PULL, PUSH, Node

HERE = str(Path(__file__).parent)

# Read when the first engine is started, and only then.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
multiprocessing.get_context("forkserver").set_forkserver_preload(["engine"])


@pytest.fixture(scope="module", params=[PULL, PUSH, OURS])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Return engines for prefill and decode with different numbers of blocks; no lease ends while a test waits."""
    with (
        Node("P", request.param, blocks=48, lease_s=300) as first,
        Node("D", request.param, blocks=80, lease_s=300) as second,
    ):
        first.ready(), second.ready()
        yield first, second
