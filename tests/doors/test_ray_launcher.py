"""`asyncfabric up --launcher ray` on two raylets: the answers of one process, while actors and a raylet are killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray_commands import CLUSTER, NODES, PROMPTS, Commands, expected_answers

from asyncfabric_services.launch.local import free_port
from children import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Child]:
    """Run two raylets; they leave no process and no folder."""
    with Child("ray_hosts.py") as found:
        yield found
        found.end()
    assert not os.path.exists(found.hello["folder"])


def test_a_cluster_on_ray_answers_as_one_process_and_is_whole_after_kills(hosts: Child, tmp_path: Path) -> None:
    expected = expected_answers()
    commands = Commands(tmp_path, hosts.ask("address")["address"])
    assert "/v1: 5 nodes ready" in commands.up()
    record = (commands.folder / "state" / "cluster.json").read_text()
    assert "secret" not in record
    lives = commands.whole(NODES, {})

    for victims in (["decode-0", "directory-0"], ["prefill-0", "router-0"]):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            answers = [threads.submit(commands.ask, prompt) for prompt in PROMPTS]
            for victim in victims:
                hosts.ask("kill_actor", node=victim)
            assert [answer.result() for answer in answers] == expected
        lives = commands.whole(NODES, {name: lives[name] for name in victims})
    assert {name: row["restarts"] for name, row in commands.rows().items()} == dict.fromkeys(NODES, 1) | {"decode-1": 0}
    assert commands.rows()["directory-0"]["link"] == json.loads(record)["directories"][0]["link"]

    lost = hosts.ask("kill_raylet")["names"]
    assert lost
    hosts.ask("add_raylet")
    commands.whole(NODES, {name: lives[name] for name in lost})
    assert [commands.ask(prompt) for prompt in PROMPTS] == expected

    assert commands.run("scale", "decode=3") == "decode: 3\n"
    assert commands.run("drain", "decode-0") == "decode-0 ended\n"
    commands.whole(NODES - {"decode-0"} | {"decode-2"}, {})
    assert [commands.ask(prompt) for prompt in PROMPTS] == expected
    assert commands.run("down") == "chat is down\n"
    assert hosts.ask("left") == {"ok": True, "actors": [], "groups": []}


def test_a_node_that_cannot_start_is_an_error_with_its_log(hosts: Child, tmp_path: Path) -> None:
    own = "[nodes.prefill]\nsettings.cluster.rails = 'tcp:nowhere0'"
    text = CLUSTER.replace("[nodes.prefill]", own)
    commands = Commands(tmp_path, hosts.ask("address")["address"], text)
    with pytest.raises(AssertionError, match=r"(?s)node prefill-0 did not start: .*nowhere0"):
        commands.up()
    assert hosts.ask("left") == {"ok": True, "actors": [], "groups": []}


def test_a_ray_that_is_gone_is_an_error_at_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(AssertionError, match=f"ended with 3: .*no Ray is reached at {address}"):
        Commands(tmp_path, address).up()
