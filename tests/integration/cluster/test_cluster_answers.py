"""A cluster of real processes gives the answers of one process, and pages back when clients leave."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

for needed in ("torch", "transformers", "openai", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

from availability import need  # noqa: E402
from cluster import MODEL, PATIENCE, SMALL, Cluster, OneProcess, Service, ask, cluster, complete  # noqa: E402

from asyncfabric.control import make_keys  # noqa: E402
from asyncfabric.control.keys import write_keys  # noqa: E402

pytestmark = pytest.mark.slow
DECODES = ("decode-1", "decode-2")


@pytest.fixture(scope="module")
def one_process() -> OneProcess:
    return OneProcess()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for the tests that leave it as it was."""
    with cluster(tmp_path_factory.mktemp("cluster"), "prefill-1", "decode-1", "decode-2") as made:
        yield made


def nothing_is_out(made: Cluster) -> None:
    made["router"].until("asyncfabric_router_inside_requests", lambda inside: inside == 0)
    for name in (*DECODES, "prefill-1"):
        made[name].until_no_page_is_out()


def test_a_crowd_gets_the_answers_of_one_process(shared: Cluster, one_process: OneProcess) -> None:
    prompts = [f"{index}: {'Pages are written once. ' * (index % 6 + 1)}" for index in range(12)]
    with shared.client() as client, ThreadPoolExecutor(6) as crowd, ask(shared["router"], "Pages", 8000) as long:
        assert long.recv(1)  # one decode node is busier now, so the other is asked as well
        answers = list(crowd.map(lambda prompt: complete(client, prompt, 20), prompts))
    assert answers == [one_process.complete(prompt, 20) for prompt in prompts]
    for name in DECODES:
        assert shared[name].metric("asyncfabric_runner_pass_requests_count") > 0, "both nodes share the load"
    nothing_is_out(shared)
    assert shared["prefill-1"].metric("asyncfabric_kv_sent_bytes_total") > 0


def test_answers_to_chats_and_drawn_ones_come_streamed(shared: Cluster) -> None:
    chat = [{"role": "user", "content": "What is a page?"}]
    with shared.client() as client:
        ask = {"model": MODEL, "messages": chat, "max_tokens": 16, "temperature": 0.8, "seed": 7}
        whole = client.chat.completions.create(**ask).choices[0].message.content
        parts = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    assert parts[-1].choices[0].finish_reason == "length"


def test_what_no_pool_can_hold_is_a_bad_request(shared: Cluster) -> None:
    import openai

    with shared.client() as client, pytest.raises(openai.BadRequestError, match="the pool has"):
        complete(client, "x" * 8000, 8000)


def test_a_prefill_node_with_another_model_is_passed_over(shared: Cluster, one_process: OneProcess) -> None:
    """Not reported to the client, whose request is fine."""
    shared.start("prefill-0", MODEL__SEED="1")  # of equals the first by name is asked first
    shared.until_routed(prefill=2, decode=2)
    with shared.client() as client:
        assert complete(client, "Pages", 8) == one_process.complete("Pages", 8)
    assert any("the layouts differ in model" in shared[name].log.read_text() for name in DECODES)
    assert shared["prefill-0"].end() == 0
    shared.until_routed(prefill=1, decode=2)


def test_clients_that_leave_in_the_middle_of_prefill_give_their_pages_back(shared: Cluster) -> None:
    """Several, one after the other in the prefill node: some leave it in the middle, the others its queue."""
    with ExitStack() as crowd:
        for _ in range(8):
            crowd.enter_context(ask(shared["router"], "x" * 8000, 2000))
        shared["prefill-1"].until("asyncfabric_kv_held_pages", lambda pages: pages > 0)
        assert sum(shared[name].metric("asyncfabric_kv_held_pages") for name in DECODES) > 0
    nothing_is_out(shared)


def test_a_client_that_leaves_in_the_middle_of_decode_gives_its_pages_back(shared: Cluster) -> None:
    with ask(shared["router"], "x" * 100, 8000) as one:
        assert one.recv(100)
        assert sum(shared[name].metric("asyncfabric_kv_held_pages") for name in DECODES) > 0
    nothing_is_out(shared)


def test_a_client_that_leaves_in_the_middle_of_a_transfer_gives_its_pages_back(
    tmp_path: Path, one_process: OneProcess
) -> None:
    """The rail holds each write for 3 s, longer than a confirmation may take: the pages come back by a fence."""
    need("fault+local")
    late, posted = "fault+local?delay_us=3000000", 'asyncfabric_posted_work_requests_total{fabric="fabric"}'
    with cluster(tmp_path, "prefill-1", "decode-1", CLUSTER__RAILS=late) as made:
        with ask(made["router"], "x" * 3000, 8):
            made["prefill-1"].until(posted, lambda requests: requests > 0)
            assert made["decode-1"].metric("asyncfabric_kv_held_pages") > 0
        for name in ("decode-1", "prefill-1"):
            made[name].until_no_page_is_out()
        assert made["prefill-1"].metric("asyncfabric_kv_sent_bytes_total") == 0, "the transfer was cut"
        with made.client() as client:
            assert complete(client, "Pages", 8) == one_process.complete("Pages", 8), "and the next one is whole"


def test_a_cluster_over_tcp_with_keys(tmp_path: Path, one_process: OneProcess) -> None:
    need("tcp:lo")
    key = tmp_path / "link.key"
    write_keys(key, *make_keys())
    wide = {"CLUSTER__BIND": "tcp", "CLUSTER__KEYS": str(key), "CLUSTER__RAILS": "tcp:lo"}
    with cluster(tmp_path, "prefill-1", "decode-1", **wide) as made, made.client() as client:
        assert "#curve=" in made["directory"].link
        assert complete(client, "Pages over tcp", 30) == one_process.complete("Pages over tcp", 30)
        for name in ("prefill-1", "decode-1"):
            made[name].until_no_page_is_out()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "cluster.directory is empty"),
        ({"CLUSTER__DIRECTORY": "somewhere"}, "expected ipc:///path/to/socket"),
        ({"CLUSTER__BIND": "tcp"}, "needs keys"),
        ({"CLUSTER__KEYS": "/nowhere/link.key"}, "no key file"),
    ],
)
def test_a_node_that_cannot_start_states_why(tmp_path: Path, settings: dict[str, str], text: str) -> None:
    log = tmp_path / "router.log"
    router = Service("router", "router", log, SMALL | {"CLUSTER__BIND": f"ipc://{tmp_path}/ipc/"} | settings)
    out, _ = router.child.communicate(timeout=PATIENCE)
    assert (router.child.returncode, out) == (2, "")
    assert text in log.read_text()
    assert "Traceback" not in log.read_text()


def test_nodes_that_are_ordered_to_stop_hand_their_requests_on(tmp_path: Path, one_process: OneProcess) -> None:
    names = ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    with cluster(tmp_path, *names, HTTP__DRAIN="500ms") as made, made.client() as client:
        stream = client.completions.create(model=MODEL, prompt="Pages", max_tokens=500, temperature=0, stream=True)
        text = next(stream).choices[0].text
        busy, other = made.busy_and_other("decode")
        assert busy.end() == 0
        assert made["prefill-1"].end() == 0
        text += "".join(part.choices[0].text for part in stream)
        assert text == one_process.complete("Pages", 500)
        assert made["router"].metric('asyncfabric_router_retries_total{because="failed"}') >= 1
        for node in (made["prefill-2"], other):
            node.until_no_page_is_out()
            assert node.end() == 0
        assert made["router"].end() == 0
        assert made["directory"].end() == 0
