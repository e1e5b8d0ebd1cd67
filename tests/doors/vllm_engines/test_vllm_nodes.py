"""`asyncfabric serve` with vLLM in the nodes: AsyncLLM, its engine process, scheduler and connector are vLLM's own.

`executor.py` stands in place of the worker; a token is a checksum over every byte of KvCache before it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
PATIENCE_S = 300.0
RUN = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from asyncfabric_services.cli import main; main()"
DESCRIBED = {
    "model_type": "llama",
    "architectures": ["ArithmeticForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "enforce_eager": True,
    "block_size": 16,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "distributed_executor_backend": "executor.ArithmeticExecutor",
    "kv_transfer_config": {"kv_buffer_device": "cpu"},
}
PROMPT = [(7 * place) % 251 for place in range(100)]


class Cluster:
    """Node processes in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.children: list[psutil.Process] = []
        self.told: dict[str, dict[str, str]] = {}
        plugin = folder / "plugin" / "arithmetic-1.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: arithmetic\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text(
            "[vllm.platform_plugins]\narithmetic = host:platform\n[vllm.general_plugins]\narithmetic = model:register\n"
        )
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(DESCRIBED))

    def start(self, role: str, name: str, *more: str) -> None:
        """Start a node; `ready` waits for it."""
        path = os.pathsep.join([str(self.folder / "plugin"), str(HERE), os.environ["PYTHONPATH"]])
        environment = {**os.environ, "PYTHONPATH": path, "ARITHMETIC_STEP_S": "0.1"}
        words = [
            "serve",
            role,
            "--node-name",
            name,
            "--http-port",
            "0",
            "--cluster-bind",
            f"ipc://{self.folder}/",
            *more,
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.nodes[name] = subprocess.Popen(
                [sys.executable, "-c", RUN, *words], env=environment, stdout=subprocess.PIPE, stderr=log
            )

    def engine(self, role: str, name: str) -> None:
        """Start a node with vLLM in it."""
        words = ["--engine", "vllm", "--model-path", str(self.folder / "model"), "--engine-args", json.dumps(ARGUMENTS)]
        self.start(role, name, "--cluster-directory", self.told["dir"]["link"], *words)

    def ready(self, name: str) -> None:
        """Wait until a node listens."""
        stdout = self.nodes[name].stdout
        assert stdout is not None
        for line in stdout:  # vLLM logs there too
            if line.startswith(b'{"listening"'):
                self.told[name] = json.loads(line)
                self.children += psutil.Process(self.nodes[name].pid).children(recursive=True)
                threading.Thread(target=stdout.read, daemon=True).start()
                return
        raise AssertionError((self.folder / f"{name}.log").read_text()[-4000:])

    def get(self, name: str, path: str) -> str:
        """Return what a node answers."""
        with urllib.request.urlopen(self.told[name]["listening"] + path, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def ask(self, count: int, **fields: Any) -> str:
        """Return the router's answer to PROMPT."""
        body = {
            "model": "asyncfabric-random",
            "prompt": PROMPT,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        request = urllib.request.Request(
            self.told["router"]["listening"] + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def ask_beside(self, count: int) -> Callable[[], str]:
        """Ask in a thread; returns what waits for the answer."""
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(self.ask(count)))
        thread.start()

        def wait() -> str:
            thread.join(PATIENCE_S)
            return found[0]

        return wait

    def in_middle(self) -> str:
        """Wait until an answer has some tokens; returns the name of the node that gives it."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for row in json.loads(self.get("router", "/requests"))["requests"]:
                if row["tokens"] >= 3:
                    return str(row["decode"])
            time.sleep(0.02)
        raise AssertionError("no answer began")

    def close(self) -> None:
        """End every process that was started, and the engines of those that were killed."""
        for node in self.nodes.values():
            node.kill()
            node.wait()
            assert node.stdout is not None
            node.stdout.close()
        for child in self.children:
            if child.is_running():
                child.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="af", dir="/tmp"))
    cluster = Cluster(folder)
    try:
        cluster.start("directory", "dir")
        cluster.ready("dir")
        cluster.start(
            "router", "router", "--cluster-directory", cluster.told["dir"]["link"], "--cluster-patience", "60s"
        )
        for role, name in (("prefill", "P"), ("decode", "D1"), ("decode", "D2")):
            cluster.engine(role, name)
        for name in ("router", "P", "D1", "D2"):
            cluster.ready(name)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the text of one engine alone."""
    program = f"import json, model; print('=' + json.dumps(model.generate({PROMPT}, 40, 16, 256)))"
    out = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout.decode()
    return bytes(json.loads(out.rpartition("=")[2])).decode(errors="replace")


def test_nodes_answer_as_one_engine_and_survive_kills_and_drains(cluster: Cluster, expected: str) -> None:
    assert cluster.ask(40) == expected, "a field that vLLM alone knows goes along"
    assert cluster.ask(40, ignore_eos=False) == expected.partition("\x02")[0], "the token that ends it is none of it"
    assert "vllm:asyncfabric_load_bytes" in cluster.get("D1", "/metrics") + cluster.get("D2", "/metrics")

    answer = cluster.ask_beside(40)
    killed = cluster.in_middle()
    engine = psutil.Process(cluster.nodes[killed].pid).children(recursive=True)
    os.kill(cluster.nodes[killed].pid, signal.SIGKILL)
    assert psutil.wait_procs(engine, PATIENCE_S)[1] == [], "an engine's processes end with their node"
    assert answer() == expected, "the other node goes on where the killed one stopped"

    left = "D2" if killed == "D1" else "D1"
    answer = cluster.ask_beside(40)
    assert cluster.in_middle() == left
    cluster.nodes[left].terminate()
    assert answer() == expected, "a drain waits for the answer"
    assert cluster.nodes[left].wait(PATIENCE_S) == 0


def test_a_node_whose_engine_dies_ends_with_a_status(cluster: Cluster) -> None:
    for child in psutil.Process(cluster.nodes["P"].pid).children(recursive=True):
        child.kill()
    assert cluster.nodes["P"].wait(PATIENCE_S) not in (0, -signal.SIGKILL)
    assert "vLLM's engine is dead" in (cluster.folder / "P.log").read_text()
