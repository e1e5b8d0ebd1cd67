"""`asyncfabric up --launcher ray` on two raylets: the answers of one machine, while actors and a raylet are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from children import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE = 240.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # as the raylets have it: without it Ray asks for another address
PROMPTS = [f"What number {number} asks for. " * (number + 1) for number in range(3)]
CLUSTER = """
name = "chat"
[settings]
model = { name = "chat", layers = 2, hidden = 64, query_heads = 4, kv_heads = 2 }
cache = { memory = "8MiB" }
cluster = { rails = "local", patience = "120s" }
http = { port = 0 }
[nodes.directory]
[nodes.prefill]
resources = { cpus = 1 }
[nodes.decode]
count = 2
resources = { cpus = 1 }
[nodes.router]
[launcher.ray]
strategy = "SPREAD"
"""


class Commands:
    """The command `asyncfabric` with a cluster's file and folder."""

    def __init__(self, folder: Path, ray: str = "") -> None:
        self.folder = folder
        self.file = folder / "cluster.toml"
        self.file.write_text(CLUSTER)
        self._router = ""
        self._environment = {**os.environ, **(LOOPBACK | {"RAY_ADDRESS": ray} if ray else {})}

    def run(self, *words: str) -> str:
        program = "from asyncfabric_services.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, *words, "--folder", str(self.folder / "state")],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self, launcher: str) -> str:
        return self.run("up", str(self.file), "--launcher", launcher, "--detach")

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = [json.loads(line) for line in self.run("status", "--json").splitlines()]
        return {row["name"]: row for row in rows}

    def ask(self, prompt: str) -> str:
        """Return the answer; a router that is gone is looked for again."""
        body = json.dumps({"model": "chat", "prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._router = self._router or self.rows()["router-0"]["http"]
                url = f"{self._router}/v1/completions"
                request = urllib.request.Request(url, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    text: str = json.load(answer)["choices"][0]["text"]
                    return text
            except (OSError, ValueError, KeyError, urllib.error.HTTPError) as error:
                assert time.monotonic() < deadline, f"no answer: {error}"
                self._router = ""

    def until_whole(self, accepted: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """Wait until all nodes are ready and the rows are accepted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            rows = self.rows()
            if {row["state"] for row in rows.values()} == {"ready"} and accepted(rows):
                return rows
            assert time.monotonic() < deadline, rows


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what the same file answers as processes of this machine."""
    local = Commands(tmp_path_factory.mktemp("local"))
    local.up("local")
    try:
        return [local.ask(prompt) for prompt in PROMPTS]
    finally:
        local.run("down")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Child]:
    """Run two raylets; they leave no process and no folder."""
    with Child("ray_hosts.py") as found:
        yield found
        found.end()
    assert not os.path.exists(found.hello["folder"])


def test_a_cluster_on_ray_answers_as_on_one_machine_and_is_whole_after_kills(
    hosts: Child, expected: list[str], tmp_path: Path
) -> None:
    commands = Commands(tmp_path, hosts.ask("address")["address"])
    assert "/v1: 5 nodes ready" in commands.up("ray")
    assert "secret" not in (commands.folder / "state" / "cluster.json").read_text()

    for victims in (["decode-0", "directory-0"], ["prefill-0", "router-0"]):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            answers = [threads.submit(commands.ask, prompt) for prompt in PROMPTS]
            for victim in victims:
                hosts.ask("kill_actor", node=victim)
            assert [answer.result() for answer in answers] == expected
        rows = commands.until_whole(lambda rows: all(rows[name]["restarts"] == 1 for name in victims))  # noqa: B023
    link = rows["directory-0"]["link"]
    assert link == json.loads((commands.folder / "state" / "cluster.json").read_text())["directory"]["link"]

    lost = hosts.ask("kill_raylet")["names"]
    assert lost
    hosts.ask("add_raylet")
    commands.until_whole(lambda rows: all(rows[name]["restarts"] == 2 for name in lost))
    assert [commands.ask(prompt) for prompt in PROMPTS] == expected

    assert commands.run("scale", "decode=3") == "decode: 3\n"
    assert len(commands.until_whole(lambda rows: "decode-2" in rows)) == 6
    assert commands.run("drain", "decode-0") == "decode-0 ended\n"
    assert sorted(commands.rows()) == ["decode-1", "decode-2", "directory-0", "prefill-0", "router-0"]
    assert [commands.ask(prompt) for prompt in PROMPTS] == expected
    assert commands.run("down") == "chat is down\n"
    assert hosts.ask("left") == {"ok": True, "actors": [], "groups": []}


def test_a_node_that_cannot_start_is_an_error_with_its_log(hosts: Child, tmp_path: Path) -> None:
    commands = Commands(tmp_path, hosts.ask("address")["address"])
    commands.file.write_text(CLUSTER.replace('rails = "local"', 'rails = "tcp:nowhere0"'))
    with pytest.raises(AssertionError, match=r"node (prefill|decode)-\d did not start: .*nowhere0"):
        commands.up("ray")
    assert hosts.ask("left") == {"ok": True, "actors": [], "groups": []}
