"""The command `asyncfabric` on a Ray cluster: a cluster of five nodes, its file, and what they answer over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.demo.cluster.one_process import OneProcess
from asyncfabric_services.launch.local import free_port
from asyncfabric_services.runner.model import ModelChoice

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


def expected_answers() -> list[str]:
    """Return what one process answers to each of PROMPTS."""
    one = OneProcess(ModelChoice(path=None, seed=0, **SHAPE), 16, 2048)
    return [one.answer(LoadRequest(prompt, COUNT)) for prompt in PROMPTS]
