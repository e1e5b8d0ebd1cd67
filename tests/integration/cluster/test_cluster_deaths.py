"""Nodes of a cluster die by SIGKILL under load: every client gets the answer of one process, survivors leak no page."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "transformers", "openai", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

from availability import need  # noqa: E402
from cluster import MODEL, Cluster, OneProcess, ask, cluster, complete  # noqa: E402

pytestmark = pytest.mark.slow
PROMPTS = [f"{index}: {'A page is written once. ' * (index * 7 + 1)}" for index in range(8)]
LENGTH = 60
LONG = 8000  # tokens: takes so long that it has not ended when something is done to it


@pytest.fixture(scope="module")
def expected() -> list[str]:
    one_process = OneProcess()
    return [one_process.complete(prompt, LENGTH) for prompt in PROMPTS]


def crowd_of(pool: ThreadPoolExecutor, client: Any) -> list[Future[str]]:
    return [pool.submit(complete, client, prompt, LENGTH) for prompt in PROMPTS]


def check(made: Cluster, answers: list[Future[str]], expected: list[str], *survivors: str) -> None:
    """Check the answers and the pages, then that the cluster goes on."""
    assert [answer.result() for answer in answers] == expected
    for name in survivors:
        made[name].until_no_page_is_out()
    with made.client() as client:
        assert complete(client, PROMPTS[0], LENGTH) == expected[0]


def test_a_decode_node_dies_under_load(tmp_path: Path, expected: list[str]) -> None:
    with (
        cluster(tmp_path, "prefill-1", "decode-1", "decode-2") as made,
        made.client() as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        with ask(made["router"], "Pages", LONG) as stream:  # it makes one of them busy for sure
            assert stream.recv(1)
            busy, other = made.busy_and_other("decode")
            answers = crowd_of(pool, client)
            busy.kill()
            made["router"].until('asyncfabric_router_retries_total{because="lost"}', lambda retries: retries >= 1)
        check(made, answers, expected, other.name, "prefill-1")


def test_a_prefill_node_stands_still_under_load_and_goes_on_and_dies(tmp_path: Path, expected: list[str]) -> None:
    """While it is stopped its process lives, so the fabric of one host has nothing to report; the directory has."""
    need("fault+local")
    late = "fault+local?delay_us=500000"  # so that streams are open for half a second, which nobody overlooks
    with (
        cluster(tmp_path, "prefill-1", "prefill-2", "decode-1", CLUSTER__RAILS=late) as made,
        made.client() as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        made["prefill-1"].child.send_signal(signal.SIGSTOP)
        assert [answer.result() for answer in crowd_of(pool, client)] == expected
        made["prefill-1"].child.send_signal(signal.SIGCONT)
        made.until_routed(prefill=2, decode=1)
        made["prefill-1"].until_no_page_is_out()
        answers = crowd_of(pool, client)
        made["prefill-1"].until("asyncfabric_kv_held_pages", lambda pages: pages > 0)
        made["prefill-1"].kill()
        check(made, answers, expected, "decode-1", "prefill-2")


def test_nobody_left_is_a_clear_error_and_a_node_that_returns_serves_again(tmp_path: Path, expected: list[str]) -> None:
    import openai

    with cluster(tmp_path, "prefill-1", "decode-1", CLUSTER__PATIENCE="1s") as made, made.client() as client:
        stream = client.completions.create(model=MODEL, prompt="Pages", max_tokens=LONG, temperature=0, stream=True)
        next(stream)
        made["decode-1"].kill()
        with pytest.raises(openai.APIError, match="no decode node"):
            list(stream)
        with pytest.raises(openai.APIStatusError, match="no decode node"):
            complete(client, PROMPTS[0], LENGTH)
        made["prefill-1"].until_no_page_is_out()
        made.until_routed(prefill=1, decode=0)
        made.start("decode-1")
        made.until_routed(prefill=1, decode=1)
        assert complete(client, PROMPTS[0], LENGTH) == expected[0]
        made["prefill-1"].kill()
        with pytest.raises(openai.APIStatusError, match="prefill node"):
            complete(client, PROMPTS[0], LENGTH)
        made["decode-1"].until_no_page_is_out()


def test_the_directory_dies_and_comes_back(tmp_path: Path, expected: list[str]) -> None:
    place = {"CLUSTER__BIND": f"ipc://{tmp_path}/places/directory.sock"}
    with cluster(tmp_path, "prefill-1", "decode-1", directory=place) as made, made.client() as client:
        made["directory"].kill()
        assert complete(client, PROMPTS[0], LENGTH) == expected[0]
        made.start("directory", **place)
        made.start("decode-2")
        made.until_routed(prefill=1, decode=2)
        made["decode-1"].kill()
        assert complete(client, PROMPTS[1], LENGTH) == expected[1]
        for name in ("decode-2", "prefill-1"):
            made[name].until_no_page_is_out()
