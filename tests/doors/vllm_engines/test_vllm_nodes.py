"""`asyncfabric serve` with vLLM in the nodes: answers, cancelled requests, what is shown, drains and kills."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from cluster import PROMPT, PROMPT_BYTES, Cluster, open_cluster, texts_alone, until

LONG = [(11 * place) % 251 for place in range(960)]
"""15 steps of prefill."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster(["P"], ["D1", "D2"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the text of one engine alone."""
    return texts_alone([PROMPT], 40)[0]


@pytest.fixture
def whole(cluster: Cluster, expected: str) -> Iterator[Cluster]:
    """Return the cluster; afterwards every block is free again and it gives right answers."""
    yield cluster
    for name in ("P", "D1", "D2"):
        cluster.nodes[name].emptied()
    assert cluster.ask(PROMPT, 40) == expected


def test_nodes_answer_as_one_engine(whole: Cluster, expected: str) -> None:
    assert whole.ask(PROMPT, 40) == expected, "a field that vLLM alone knows goes along"
    found = whole.ask(PROMPT, 40, ignore_eos=False)
    assert found == expected.partition("\x02")[0], "the token that ends it is none of it"
    shown = whole.nodes["D1"].get("/metrics") + whole.nodes["D2"].get("/metrics")
    assert "vllm:asyncfabric_load_bytes" in shown


def test_a_client_that_leaves_in_the_middle_of_an_answer_frees_the_blocks_of_both_engines(whole: Cluster) -> None:
    connection = whole.connect(PROMPT, 400, stream=True)
    node = whole.nodes[whole.in_middle()]
    assert node.metric("asyncfabric_kv_held_pages") > 0
    connection.close()
    begun = time.monotonic()
    node.emptied()
    assert time.monotonic() - begun < 20, "the rest of the answer would take 40 s"


def test_a_client_that_leaves_while_its_prompt_is_computed_frees_the_blocks_of_prefill(whole: Cluster) -> None:
    first = whole.nodes["P"]
    connection = whole.connect(LONG, 10)
    until(lambda: first.metric("asyncfabric_kv_held_pages") > 4)
    connection.close()
    begun = time.monotonic()
    first.emptied()
    assert time.monotonic() - begun < 20, "its lease of 30 s is not waited for"


def test_a_client_that_leaves_while_blocks_are_under_way_frees_them_with_proof(whole: Cluster) -> None:
    first, seconds = whole.nodes["P"], [whole.nodes["D1"], whole.nodes["D2"]]
    for second in seconds:
        second.freeze()
    connection = whole.connect(PROMPT, 10)
    until(lambda: first.metric("asyncfabric_kv_held_pages") > 0)
    until(lambda: first.metric("asyncfabric_node_inside_requests") == 0)
    first.freeze()  # before any engine has asked for the blocks
    for second in seconds:
        second.thaw()
    until(lambda: sum(second.metric("asyncfabric_kv_held_pages") for second in seconds) > 0)
    connection.close()
    until(lambda: sum(second.metric("asyncfabric_node_inside_requests") for second in seconds) == 0)
    held = sum(second.metric("asyncfabric_kv_held_pages") for second in seconds)
    assert held > 0, "nothing has proved that no byte arrives any more"
    first.thaw()
    for second in seconds:
        second.emptied()
    cancelled = sum(second.metric("vllm:asyncfabric_cancelled_loads_total") for second in seconds)
    assert cancelled == 1


def test_why_and_top_show_who_waits_for_whom_and_how_many_blocks_are_held(whole: Cluster) -> None:
    first = whole.nodes["P"]
    first.freeze()
    answer = whole.ask_beside(PROMPT, 60)
    seconds = [whole.nodes["D1"], whole.nodes["D2"]]
    until(lambda: sum(second.metric("asyncfabric_node_inside_requests") for second in seconds) == 1)
    rows = [row for second in seconds for row in second.look("why")]
    assert [(row["waits_for"], row["missing_from"], row["need"]) for row in rows] == [("its prompt", ["P"], 100)]
    until(lambda: bool(first.look("why")))
    assert [(row["waits_for"], row["need"]) for row in first.look("why")] == [("vLLM", 100)]
    first.thaw()
    node = whole.nodes[whole.in_middle()]
    (row,) = node.look("top", "--once", "--interval", "500ms")
    assert (row["role"], row["requests"]) == ("decode", 1)
    assert row["held_pages"] >= 7
    assert row["held_pages"] + row["free_pages"] == node.blocks
    assert 0 < row["tokens_per_s"] <= 12, "a step takes 0.1 s, and one more may end within half a second"
    assert node.look("why") == [], "its blocks are here"
    (row,) = first.look("top", "--once", "--interval", "100ms")
    assert row["held_pages"] == 0
    answer()


def test_pushed_bytes_and_their_rate_are_shown(whole: Cluster) -> None:
    first, seconds = whole.nodes["P"], [whole.nodes["D1"], whole.nodes["D2"]]

    def pushed() -> float:
        return first.metric("asyncfabric_written_bytes_total")

    def loaded() -> float:
        return sum(second.metric("vllm:asyncfabric_load_bytes_sum") for second in seconds)

    before, begun = pushed(), loaded()
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(first.look, "top", "--once", "--interval", "3s")
        answers = 0
        while not looking.done():
            whole.ask(PROMPT, 2)
            answers += 1
        (row,) = looking.result()
    until(lambda: min(pushed() - before, loaded() - begun) >= answers * PROMPT_BYTES)
    assert pushed() - before == loaded() - begun == answers * PROMPT_BYTES
    assert answers > 1
    assert 0 < row["sent_bytes_per_s"] * 3 <= answers * PROMPT_BYTES
    assert [second.metric("asyncfabric_written_bytes_total") for second in seconds] == [0, 0]


def test_a_trace_shows_a_request_at_router_prefill_and_decode_with_its_push(whole: Cluster, tmp_path: Path) -> None:
    events = whole.record(tmp_path / "picture.json", 8, lambda: whole.ask(PROMPT, 5))
    by_trace: dict[str, set[str]] = {}
    for event in events:
        by_trace.setdefault(event["args"].get("trace", ""), set()).add(event["name"])
    wanted = {"request", "answer", "prefill prompt", "prefill", "push", "load", "decode"}
    assert any(names >= wanted for trace, names in by_trace.items() if trace), by_trace


def test_answers_survive_a_kill_and_a_drain(cluster: Cluster, expected: str) -> None:
    answer = cluster.ask_beside(PROMPT, 40)
    killed = cluster.in_middle()
    cluster.nodes[killed].kill()
    assert answer() == expected, "the other node goes on where the killed one stopped"

    left = "D2" if killed == "D1" else "D1"
    answer = cluster.ask_beside(PROMPT, 40)
    assert cluster.in_middle() == left
    cluster.nodes[left].terminate()
    assert answer() == expected, "a drain waits for the answer"
    assert cluster.nodes[left].wait() == 0


def test_a_node_whose_engine_dies_ends_with_a_status(cluster: Cluster) -> None:
    node = cluster.nodes["P"]
    for child in psutil.Process(node.pid).children(recursive=True):
        child.kill()
    assert node.wait() not in (0, -signal.SIGKILL)
    assert "vLLM's engine is dead" in node.log.read_text()
