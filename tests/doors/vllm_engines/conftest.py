"""Starts the process that imports vLLM once; engines are forked from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import preload

from nodes import OURS, PULL, PUSH, Node

preload()


@pytest.fixture(scope="module", params=[PULL, PUSH, OURS])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Return engines for prefill and decode with different numbers of blocks; no lease ends while a test waits."""
    with (
        Node("P", request.param, blocks=48, lease_s=300) as first,
        Node("D", request.param, blocks=80, lease_s=300) as second,
    ):
        first.ready(), second.ready()
        yield first, second
