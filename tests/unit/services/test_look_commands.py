"""`asyncfabric why`, `top`, `peers ls`, `mr ls` over scripted nodes: rows, rates, JSON, silent nodes, exit statuses."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from look_site import site

from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.look import asking
from asyncfabric_services.look.asking import checked_url
from asyncfabric_services.look.rates import Sample, row_of
from asyncfabric_services.look.reports import ReportedHealth
from asyncfabric_services.look.tables import in_bytes, in_time

WAIT = {
    "what": "r7/1, lease 3",
    "waits_for": "arrivals of imm 5",
    "have": 3,
    "need": 115,
    "missing_from": ["prefill-1"],
    "for_s": 2.5,
    "detail": {"imm": 5},
}
DECODE = {"node": "decode-1", "role": "decode", "why": [WAIT]}
PEER = {"plane": "fabric", "peer": "p[red]1", "state": "lost", "provider": "local", "bytes_sent": 25650}
REGION = {
    "owner": "pages",
    "id": 1,
    "length_bytes": 4096,
    "device": "cpu",
    "access": "write",
    "generation": 2,
    "age_s": 61.0,
    "cost_s": 0.0035,
    "quarantined": True,
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(asyncfabric, arguments, standalone_mode=False)


def status_of(result: Result) -> int:
    """Return the exit status that `main` would end with."""
    if result.exception is None:
        return int(result.return_value)
    return int(getattr(result.exception, "exit_code", -1))


def dead_url() -> str:
    """Return an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_why_states_who_waits_for_what_and_from_whom() -> None:
    with site(why=DECODE) as node:
        shown = run("why", "--node", node.url)
        rows = run("why", "--node", node.url, "--json")
    assert status_of(shown) == status_of(rows) == 0
    for stated in ("decode-1", "r7/1, lease 3", "arrivals of imm 5", "3 of 115", "prefill-1", "2.5 s"):
        assert stated in shown.stdout
    assert [json.loads(line) for line in rows.stdout.splitlines()] == [{"node": "decode-1", "role": "decode", **WAIT}]


def test_nobody_waits_is_stated_and_is_no_row() -> None:
    with site(why=DECODE | {"why": []}) as node:
        assert run("why", "--node", node.url).stdout == "nobody waits for anything\n"
        assert run("why", "--node", node.url, "--json").stdout == ""


def test_a_directory_names_all_nodes_and_a_silent_one_is_reported_by_name() -> None:
    dead = dead_url()
    with site(why=DECODE) as first, site(why=DECODE | {"node": "decode-2"}) as second, site() as directory:
        rows = [("decode-1", first.url), ("decode-2", second.url), ("prefill-9", dead), ("old", "")]
        directory.answers["/nodes"] = {"nodes": [{"name": name, "http": url} for name, url in rows]}
        result = run("why", "--directory", directory.url, "--json")
    assert status_of(result) == 0
    assert [json.loads(line)["node"] for line in result.stdout.splitlines()] == ["decode-1", "decode-2"]
    assert f"prefill-9 at {dead} does not answer" in result.stderr
    assert "old did not report where its HTTP endpoint is" in result.stderr


def test_peers_and_regions_have_their_tables() -> None:
    with site(
        peers={"node": "d", "role": "decode", "peers": [PEER]}, regions={"node": "d", "regions": [REGION]}
    ) as one:
        peers, regions = run("peers", "ls", "--node", one.url), run("mr", "ls", "--node", one.url)
        as_json = run("mr", "ls", "--node", one.url, "--json")
    for stated in ("p[red]1", "lost", "local", "25.6 kB"):
        assert stated in peers.stdout
    for stated in ("pages", "4,096", "1.02 min", "3.5 ms", "yes"):
        assert stated in regions.stdout
    assert json.loads(as_json.stdout) == {"node": "d", "role": "", **REGION}


@pytest.mark.parametrize(
    "arguments",
    [
        ("why",),
        ("why", "--node", "ftp://a:1"),
        ("peers", "ls", "--node", "http://a"),
        ("mr", "ls", "--node", "http://a:1/health"),
        ("top", "--node", "http://a:port"),
        ("top", "--once", "--interval", "0s", "--node", "a:1"),
        ("why", "--node", "a:1", "--patience", "soon"),
    ],
)
def test_wrong_use_is_status_2(arguments: tuple[str, ...]) -> None:
    assert status_of(run(*arguments)) == 2


@pytest.mark.parametrize("command", [("why",), ("peers", "ls"), ("mr", "ls"), ("top", "--once")])
@pytest.mark.parametrize("place", ["--node", "--directory"])
def test_no_answer_is_status_3(command: tuple[str, ...], place: str) -> None:
    result = run(*command, place, dead_url())
    assert status_of(result) == 3


def test_what_is_no_directory_is_wrong_use() -> None:
    with site(why=DECODE) as node:
        result = run("why", "--directory", node.url)
        node.answers["/nodes"] = [1, 2]
        other = run("why", "--directory", node.url)
    assert (status_of(result), status_of(other)) == (2, 2)
    assert "is no directory" in str(result.exception)


@pytest.mark.parametrize("body", [b"no JSON", (500, b"broken"), (503, {"error": "closed"})])
def test_strange_answers_are_reported_and_are_no_answers(body: Any) -> None:
    with site(why=body) as node:
        result = run("why", "--node", node.url)
    assert status_of(result) == 3
    assert "does not answer: " in result.stderr


@pytest.mark.parametrize("command", [("why",), ("peers", "ls"), ("mr", "ls"), ("top", "--once", "--interval", "1ms")])
def test_texts_of_nodes_do_not_steer_the_terminal(command: tuple[str, ...]) -> None:
    evil = "x\x1b]0;title\x07\x9b2J\u202e\x7f\r\nnode-7 fine"
    row = dict.fromkeys(("node", "role", "state", "name"), evil)
    wait = WAIT | {"what": evil, "waits_for": evil, "missing_from": [evil]}
    peer, region = (
        dict.fromkeys(PEER, evil) | {"bytes_sent": 1},
        REGION | dict.fromkeys(("owner", "device", "access"), evil),
    )
    answers = {
        "why": row | {"why": [wait]},
        "peers": row | {"peers": [peer]},
        "regions": row | {"regions": [region]},
        "look": look(1, 1, health=row, peers=[peer], why=[wait]),
    }
    with site(**answers) as node, site() as broken, site() as directory:
        broken.answers |= dict.fromkeys(("/why", "/peers", "/regions", "/look"), (500, evil.encode()))
        rows = [(evil, node.url), (evil, broken.url), (evil, dead_url()), (evil, "")]
        directory.answers["/nodes"] = {"nodes": [{"name": name, "http": url} for name, url in rows]}
        result = run(*command, "--directory", directory.url)
    assert status_of(result) == 0
    text = result.stdout + result.stderr
    assert text.count("\\x1b]0;title") >= 4 and "\nnode-7" not in text
    assert text.replace("\n", "").isprintable(), ascii(text)


def test_a_node_that_is_slow_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = run("why", "--node", url, "--patience", "20ms")
    assert status_of(result) == 3
    assert "no whole answer within 0.02 s" in result.stderr


def look(written: int, tokens: int, **pages: Any) -> dict[str, Any]:
    metrics = {
        'asyncfabric_written_bytes_total{fabric="fabric"}': written,
        'asyncfabric_runner_computed_tokens_total{kind="answer"}': tokens,
        "asyncfabric_kv_free_pages": 7.0,
    }
    return {"metrics": metrics} | pages


def test_top_shows_rates_of_two_samples_and_pages_of_the_last() -> None:
    pages = {"health": {"state": "draining", "role": "decode", "name": "decode-1"}, "why": [WAIT]}
    with site(look=[look(1000, 5, **pages), look(5_001_000, 25, **pages)]) as node:
        result = run("top", "--node", node.url, "--once", "--json", "--interval", "1ms")
        shown = run("top", "--node", node.url, "--once", "--interval", "1ms")
    assert status_of(result) == status_of(shown) == 0
    row = json.loads(result.stdout)
    assert (row["node"], row["state"], row["free_pages"], row["waits"]) == ("decode-1", "draining", 7, 1)
    assert row["sent_bytes_per_s"] / row["tokens_per_s"] == pytest.approx(5_000_000 / 20)
    assert row["ops_per_s"] is None, "a node without a fabric has no rate of one"
    assert "draining" in shown.stdout and "0 B/s" in shown.stdout


def test_rates_are_of_the_time_between_and_not_of_another_life() -> None:
    def sample(at: float, written: float) -> Sample:
        return Sample(at, ReportedHealth(), {'asyncfabric_written_bytes_total{fabric="fabric"}': written})

    rate: Callable[..., Any] = lambda before, now: row_of(before, now)["sent_bytes_per_s"]  # noqa: E731
    assert rate(sample(1.0, 100), sample(3.0, 300)) == 100
    assert rate(None, sample(3.0, 300)) is None
    assert rate(sample(1.0, 300), sample(3.0, 100)) is None
    assert rate(sample(3.0, 300), sample(3.0, 300)) is None


def test_values_and_addresses_as_people_write_them() -> None:
    assert [in_bytes(value) for value in (None, 0, 999, 1000, 25_650, 3.2e9)] == [
        "",
        "0 B",
        "999 B",
        "1 kB",
        "25.6 kB",
        "3.2 GB",
    ]
    assert [in_time(value) for value in (None, 0.5e-6, 0.0031, 2.5, 61, 7200)] == [
        "",
        "0.5 us",
        "3.1 ms",
        "2.5 s",
        "1.02 min",
        "2 h",
    ]
    assert checked_url("localhost:8100") == checked_url("http://localhost:8100/") == "http://localhost:8100"


async def _interrupted() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()


def test_ctrl_c_is_no_group_of_errors() -> None:
    with pytest.raises(KeyboardInterrupt):
        asking.run(_interrupted)
