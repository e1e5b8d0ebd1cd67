"""Nodes whose engines have workers in processes of their own, under vLLM's executor: tensor parallel sizes differ."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from cluster import PROMPT, PROMPT_BYTES, Cluster, open_cluster, texts_alone, until

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
LOADED = "vllm:asyncfabric_load_bytes_sum"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster([], []) as cluster:
        cluster.engine("prefill", "P1")
        cluster.engine("decode", "D2", **TWO)
        cluster.ready("P1", "D2")
        yield cluster


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the text of one engine alone."""
    return texts_alone([PROMPT], 20)[0]


def test_one_worker_prefills_for_two_processes(cluster: Cluster, expected: str) -> None:
    first, second = cluster.nodes["P1"], cluster.nodes["D2"]
    assert len(second.engine) >= 3, "the engine's core and two workers"
    assert [cluster.ask(PROMPT, 20) for _ in range(2)] == [expected] * 2
    first.emptied(), second.emptied()
    assert second.metric(LOADED) == 2 * PROMPT_BYTES, "each worker loads its heads, and no token is computed again"


def test_two_processes_prefill_for_one_worker(cluster: Cluster, expected: str) -> None:
    cluster.engine("prefill", "P2", **TWO)
    cluster.engine("decode", "D1")
    cluster.ready("P1", "P2", "D1", "D2")
    cluster.nodes["P1"].kill()
    cluster.nodes["D2"].kill()
    assert [cluster.ask(PROMPT, 20) for _ in range(2)] == [expected] * 2
    first, second = cluster.nodes["P2"], cluster.nodes["D1"]
    first.emptied(), second.emptied()
    assert second.metric(LOADED) == 2 * PROMPT_BYTES


def test_after_the_kill_of_one_worker_its_node_ends_and_another_answers(cluster: Cluster, expected: str) -> None:
    cluster.engine("decode", "D3", **TWO)
    cluster.ready("P2", "D1", "D3")
    asked = [cluster.ask_beside(PROMPT, 20) for _ in range(4)]
    until(lambda: cluster.nodes["D3"].metric("asyncfabric_node_inside_requests") > 0)
    node = cluster.nodes["D3"]
    workers = [each for each in node.engine if each.ppid() != node.pid]  # the core's children
    assert len(workers) == 2
    workers[1].kill()
    assert [answer() for answer in asked] == [expected] * 4
    assert node.wait() != 0
    assert psutil.wait_procs(node.engine, 30)[1] == []
    cluster.nodes["D1"].emptied()
