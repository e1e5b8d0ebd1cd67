"""Looking at a cluster of real processes: a hung stream has its names, every node answers, one trace joins its ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "transformers", "openai", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

from cluster import PATIENCE, RUN, Cluster, cluster, complete  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT = "A page is written once. " * 12  # 288 tokens: five chunks, 18 pages in each of 3 layers
PIECES = 3 * 18 + 1
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Prompts that are asked again are computed again, chunk by chunk.
    with cluster(tmp_path_factory.mktemp("look"), "prefill-1", "decode-1", CACHE__PREFIXES="drop") as made:
        yield made


def asyncfabric(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-P", "-c", RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ)


def rows(made: Cluster, *command: str) -> list[dict[str, Any]]:
    """Return what a reading command prints about all nodes of the cluster."""
    ended = asyncfabric(*command, "--directory", made["directory"].address, "--json")
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def until(condition: Callable[[], Any]) -> Any:
    """Return what the condition returns, once that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


@contextmanager
def stopped(made: Cluster, name: str) -> Iterator[None]:
    """Hold a process still: it is there, and answers nobody."""
    made[name].child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        made[name].child.send_signal(signal.SIGCONT)


def test_a_hung_stream_names_its_source_and_its_request(shared: Cluster) -> None:
    with shared.client() as client, ThreadPoolExecutor(1) as pool:
        complete(client, PROMPT, 2)  # both nodes know each other
        decode, router = (f"--node={shared[name].address}" for name in ("decode-1", "router"))
        with stopped(shared, "prefill-1"):
            answer = pool.submit(complete, client, PROMPT, 2)

            def hung() -> list[dict[str, Any]]:
                reported = asyncfabric("why", decode, router, "--json")
                found = [json.loads(line) for line in reported.stdout.splitlines()]
                return found if {row["node"] for row in found} == {"decode-1", "router"} else []

            at_decode, at_router = sorted(until(hung), key=lambda row: str(row["node"]))
            assert at_decode["missing_from"] == ["prefill-1"]
            assert at_decode["waits_for"] == f"arrivals of imm {at_decode['detail']['imm']}"
            assert (at_decode["have"], at_decode["need"]) == (0, PIECES)
            assert at_router["missing_from"] == ["decode-1"]
            request = at_router["what"].removeprefix("request ")
            assert at_decode["what"].startswith(f"{request}/"), "both ends report the same request"
            assert at_decode["for_s"] > 0
            stuck = shared["prefill-1"].address
            silent = asyncfabric("why", decode, f"--node={stuck}", "--patience", "1s")
            assert (silent.returncode, f"at {stuck} does not answer" in silent.stderr) == (0, True)
            assert request in silent.stdout
            (row,) = json.loads(shared["router"].get("/requests"))["requests"]
            assert (row["request"], row["decode"], row["sources"]) == (request, "decode-1", ["prefill-1"])
            assert (row["prompt_tokens"], row["tokens"], row["max_tokens"], row["attempts"]) == (len(PROMPT), 0, 2, 1)
            assert PROMPT[:10] not in json.dumps(row), "what is asked is nobody's business"
        answer.result()
    for name in ("decode-1", "prefill-1"):
        shared[name].until_no_page_is_out()
    assert until(lambda: rows(shared, "why") == [])
    assert json.loads(shared["router"].get("/requests"))["requests"] == []


def test_every_node_reports_its_peers_and_its_memory(shared: Cluster) -> None:
    shared.until_routed(prefill=1, decode=1)
    with shared.client() as client:
        complete(client, PROMPT, 2)
    places = {name: node.address for name, node in shared.nodes.items()}
    assert until(lambda: {row["name"]: row["http"] for row in nodes_of(shared)} == places)
    fabric = {(row["node"], row["peer"]): row for row in rows(shared, "peers", "ls") if row["plane"] == "fabric"}
    assert set(fabric) == {("decode-1", "prefill-1"), ("prefill-1", "decode-1")}
    assert fabric["prefill-1", "decode-1"]["bytes_sent"] > fabric["decode-1", "prefill-1"]["bytes_sent"] > 0
    regions = rows(shared, "mr", "ls")
    owners = sorted((row["node"], row["owner"]) for row in regions)
    assert owners == [(node, owner) for node in ("decode-1", "prefill-1") for owner in ("contexts", "pages")]
    assert all(row["length_bytes"] > 0 and row["age_s"] > 0 and not row["quarantined"] for row in regions)
    members = json.loads(shared["router"].get("/members"))["members"]
    assert {"decode-1", "prefill-1"} <= {row["name"] for row in members if row["state"] == "ready"}


def nodes_of(made: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(made["directory"].get("/nodes"))["nodes"]
    return found


def test_top_has_a_row_for_each_node(shared: Cluster) -> None:
    found = {row["node"]: row for row in rows(shared, "top", "--once", "--interval", "50ms")}
    assert set(found) == {"directory", "router", "prefill-1", "decode-1"}
    assert all(row["state"] == "ready" for row in found.values())
    assert found["decode-1"]["held_pages"] == 0 < found["decode-1"]["free_pages"]
    assert found["prefill-1"]["sent_bytes_per_s"] >= 0


class Picture:
    """A merged trace, by what is in it."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text())["traceEvents"]
        named = (event for event in events if event["ph"] == "M" and event["name"] == "process_name")
        self.process = {event["args"]["name"]: event["pid"] for event in named}
        self.events: list[dict[str, Any]] = events

    def spans(self, node: str, name: str) -> list[dict[str, Any]]:
        """Return the spans of a node that belong to the test's trace."""
        mine = (event for event in self.of(node, "X") if event.get("cat") == "span")
        return [event for event in mine if event["name"] == name and event["args"]["trace"] == TRACE]

    def of(self, node: str, phase: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] == phase and event["pid"] == self.process[node]]


def end_of(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and end_of(inner) <= end_of(outer))


def recorded(picture: Picture, node: str, name: str, parent: dict[str, Any]) -> dict[str, Any] | None:
    """Return the span of a node under a parent, if it is whole."""
    found = [one for one in picture.spans(node, name) if one["args"]["parent"] == parent["args"]["span"]]
    return found[0] if found and "unfinished" not in found[0]["args"] else None


def whole_requests(picture: Picture) -> list[list[dict[str, Any]]]:
    """Return the requests that were recorded on all nodes from begin to end, each as the spans from outside in."""
    steps = [("router", "attempt"), ("decode-1", "answer"), ("decode-1", "fill prompt"), ("prefill-1", "prefill")]
    found = []
    for request in picture.spans("router", "request"):
        chain: list[dict[str, Any]] = [request]
        for node, name in steps:
            if (inner := recorded(picture, node, name, chain[-1])) is not None:
                chain.append(inner)
        if len(chain) == len(steps) + 1:
            found.append(chain)
    return found


def record_requests(made: Cluster, output: Path, kept: Path) -> Picture:
    """Record the cluster while requests run, longer and longer until one is whole: machines may be slow."""
    for seconds in ("3s", "10s", "40s"):
        places = ["--directory", made["directory"].address, "--patience", "30s", "--seconds", seconds]
        with ThreadPoolExecutor(1) as pool, made.client() as client:
            recording = pool.submit(asyncfabric, "trace", "record", *places, "-o", str(output), "--keep", str(kept))
            while not recording.done():
                complete(client, PROMPT, 8, extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        ended = recording.result()
        assert ended.returncode == 0, ended.stderr
        assert "of 4 nodes" in ended.stdout
        if whole_requests(picture := Picture(output)):
            return picture
    pytest.fail("no request was recorded on all nodes from its begin to its end")


def test_one_trace_joins_router_decode_and_prefill(shared: Cluster, tmp_path: Path) -> None:
    output, kept = tmp_path / "trace.json", tmp_path / "kept"
    picture = record_requests(shared, output, kept)
    assert set(picture.process) == {"directory", "router", "prefill-1", "decode-1"}
    whole = whole_requests(picture)
    request, attempt, answer, fill, prefill = whole[len(whole) // 2]
    assert request["args"]["parent"] == PARENT, "the client's own span"
    assert inside(attempt, request) and inside(answer, attempt) and inside(fill, answer)
    assert fill["ts"] <= prefill["ts"] <= end_of(fill), (
        "the job begins while the decode node waits; its last ack is late"
    )
    decode = recorded(picture, "decode-1", "decode", answer)
    assert decode is not None and inside(decode, answer) and end_of(fill) <= decode["ts"]
    assert decode["args"]["tokens"] == request["args"]["tokens"] == 8
    compute = recorded(picture, "prefill-1", "compute", prefill)
    stream = recorded(picture, "prefill-1", "stream", prefill)
    assert compute is not None and stream is not None
    assert inside(compute, prefill) and inside(compute, fill), "the last layer left after it was computed"
    assert compute["ts"] <= stream["ts"] and inside(stream, prefill)
    chunks = [one for one in picture.spans("prefill-1", "chunk") if one["args"]["parent"] == compute["args"]["span"]]
    assert [chunk["args"]["first"] for chunk in chunks] == [0, 64, 128, 192, 256]
    assert all(inside(chunk, compute) for chunk in chunks)

    # Transfers on both ends of this one stream: what left the source between its begin and its end, what was counted.
    assert stream["args"]["lease"] == fill["args"]["lease"]
    sent = [one for one in picture.of("prefill-1", "b") if stream["ts"] <= one["ts"] <= end_of(stream)]
    assert sum(one["args"]["bytes"] for one in sent) >= stream["args"]["bytes"] > 0
    assert stream["args"]["imms"] == fill["args"]["imms"]
    counted = [one for one in picture.of("decode-1", "C") if one["name"] == f"imm {fill['args']['imms']}"]
    before = [one["args"]["counted"] for one in counted if one["ts"] < fill["ts"]]
    arrivals = [one["args"]["counted"] for one in counted if fill["ts"] <= one["ts"] <= end_of(fill)]
    assert arrivals[-1] - (before[-1] if before else 0) == fill["args"]["pieces"] == PIECES

    arrows = {one["id"] for one in picture.of("decode-1", "s")} & {one["id"] for one in picture.of("prefill-1", "f")}
    assert f"{TRACE}.{prefill['args']['span']}" in arrows
    again = tmp_path / "again.json"
    assert asyncfabric("trace", "merge", *map(str, sorted(kept.iterdir())), "-o", str(again)).returncode == 0
    assert len(json.loads(again.read_text())["traceEvents"]) == len(picture.events)
