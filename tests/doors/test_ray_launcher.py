"""`asyncfabric up --launcher ray` on two raylets: the answers of one process, while actors and a raylet are killed."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.demo.cluster.one_process import OneProcess
from asyncfabric_services.launch.local import free_port
from asyncfabric_services.runner.model import ModelChoice
from children import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PATIENCE = 600.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # as the raylets have it: without it Ray asks for another address
COUNT = 24
SHAPE = {"layers": 2, "hidden": 64, "query_heads": 4, "kv_heads": 2}
NODES = {"directory-0", "prefill-0", "decode-0", "decode-1", "router-0"}
PROMPTS = [f"What number {number} asks for. " * (number + 1) for number in range(3)]
CLUSTER = """
name = "chat"
[settings]
model = {{ name = "chat", layers = 2, hidden = 64, query_heads = 4, kv_heads = 2 }}
cache.memory = "8MiB"
cluster.rails = "local"
cluster.patience = "120s"
router.deadline = "240s"
[nodes.directory]
settings.http.port = {directory}
[nodes.prefill]
resources.cpus = 1
[nodes.decode]
count = 2
resources.cpus = 1
[nodes.router]
settings.http.port = {router}
[launcher.ray]
strategy = "SPREAD"
"""


class Commands:
    """The command `asyncfabric` with a cluster's file and folder, and the cluster over HTTP."""

    def __init__(self, folder: Path, ray: str, text: str = CLUSTER) -> None:
        self.folder = folder
        self.file = folder / "cluster.toml"
        self._ports = {"directory": free_port(), "router": free_port()}
        self.file.write_text(text.format(**self._ports))
        self._environment = {**os.environ, **LOOPBACK, "RAY_ADDRESS": ray}

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "asyncfabric_services", *words, "--folder", str(self.folder / "state")],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self) -> str:
        return self.run("up", str(self.file), "--launcher", "ray", "--detach")

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = [json.loads(line) for line in self.run("status", "--json").splitlines()]
        return {row["name"]: row for row in rows}

    def ask(self, prompt: str) -> str:
        """Return the answer; while the router is away it is asked again."""
        body = {"model": "chat", "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
        return str(self._fetch("router", "/v1/completions", json.dumps(body).encode())["choices"][0]["text"])

    def whole(self, names: Iterable[str], before: dict[str, str]) -> dict[str, str]:
        """Wait until exactly these nodes are ready, none in the life that it had before; return their lives."""
        deadline = time.monotonic() + PATIENCE
        while True:
            rows = self._fetch("directory", "/nodes")["nodes"]
            lives = {row["name"]: row["incarnation"] for row in rows if row["state"] == "ready"}
            if lives.keys() == set(names) and not before.items() & lives.items():
                return lives
            assert time.monotonic() < deadline, (rows, before)
            time.sleep(0.3)

    def _fetch(self, role: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self._ports[role]}{path}", body)
        request.add_header("content-type", "application/json")
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    found: dict[str, Any] = json.load(answer)
                    return found
            except (OSError, http.client.HTTPException) as error:
                assert time.monotonic() < deadline, f"no answer: {error}"
                time.sleep(0.3)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Child]:
    """Run two raylets; they leave no process and no folder."""
    with Child("ray_hosts.py") as found:
        yield found
        found.end()
    assert not os.path.exists(found.hello["folder"])


def test_a_cluster_on_ray_answers_as_one_process_and_is_whole_after_kills(hosts: Child, tmp_path: Path) -> None:
    one = OneProcess(ModelChoice(path=None, seed=0, **SHAPE), 16, 2048)
    expected = [one.answer(LoadRequest(prompt, COUNT)) for prompt in PROMPTS]
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
