"""A cluster of `asyncfabric serve` nodes with vLLM in them, as processes that a test asks, freezes and kills.

Nodes are forked from a process that has imported vLLM: AsyncLLM, its engine process, scheduler and connector are vLLM's
own; for ARITHMETIC `worker.py` stands in place of the worker. vLLM is not imported in this process.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

HERE = Path(__file__).parent
PATIENCE_S = 300.0
SERVICES = ["asyncfabric_services.nodes.prefill_service", "asyncfabric_services.nodes.decode_service"]
RUN = "from asyncfabric_services.cli import main; main()"
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
    "worker_cls": "worker.Worker",
    "kv_transfer_config": {"kv_buffer_device": "cpu"},
}


PROMPT = [(7 * place) % 251 for place in range(100)]
PROMPT_BYTES = 7 * 3 * 2 * 2 * 16 * 16 * 4
"""Blocks of the prompt, layers, keys and values, heads, tokens of a block, numbers of a head, bytes of a number."""


@dataclass(frozen=True)
class Served:
    """What the nodes serve: a model as its config.json has it, vLLM's engine arguments, modules to import for both."""

    described: dict[str, Any]
    arguments: dict[str, Any]
    preloaded: tuple[str, ...]

    def with_lease(self, seconds: float) -> Served:
        """Return the same with blocks that wait so long for an engine that asks for them."""
        transfer = self.arguments["kv_transfer_config"] | {"kv_connector_extra_config": {"lease_s": seconds}}
        return Served(self.described, self.arguments | {"kv_transfer_config": transfer}, self.preloaded)


ARITHMETIC = Served(DESCRIBED, ARGUMENTS, ("engine", "worker"))


class NodeProcess:
    """One node and the processes of its engine."""

    def __init__(self, folder: Path, name: str, words: list[str], environment: dict[str, str]) -> None:
        """Start it by the words of `asyncfabric serve ROLE ...`."""
        self.name, self.role, self.log = name, words[1], folder / f"{name}.log"
        self._out = folder / f"{name}.out"
        self._out.unlink(missing_ok=True)
        self.reported: dict[str, str] = {}
        self.blocks = 0.0
        self.engine: list[psutil.Process] = []
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=serve, args=(words, environment, str(self._out), str(self.log)))
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def ready(self) -> None:
        """Wait until the node listens; what it printed is in `reported`."""
        end = time.monotonic() + PATIENCE_S
        while not self.listens():
            if time.monotonic() > end or not self._process.is_alive():
                raise AssertionError(f"{self.name} does not listen: {self.log.read_text()[-4000:]}")
            time.sleep(0.02)
        self.engine = psutil.Process(self.pid).children(recursive=True)
        if self.engine:
            self.blocks = self.metric("asyncfabric_kv_free_pages", "asyncfabric_kv_held_pages")

    def listens(self) -> bool:
        """Return whether the node listens."""
        for line in self._out.read_text().splitlines() if self._out.exists() else []:
            if line.startswith('{"listening"') and line.endswith("}"):
                self.reported = json.loads(line)
                return True
        return False

    def wait(self) -> int:
        """Wait for its end; return its status, negative for a signal."""
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None, f"{self.name} goes on"
        return self._process.exitcode

    def kill(self) -> None:
        """End the node by -9, and wait until the processes of its engine have ended too."""
        self._process.kill()
        self._process.join()
        left = psutil.wait_procs(self.engine, PATIENCE_S)[1]
        assert left == [], "an engine's processes end with their node"

    def terminate(self) -> None:
        """Have it drain."""
        self._process.terminate()

    def look(self, *words: str) -> list[dict[str, Any]]:
        """Return the rows of a command that looks at this node."""
        words = (*words, "--node", self.reported["listening"], "--json")
        out = subprocess.run([sys.executable, "-P", "-c", RUN, *words], stdout=subprocess.PIPE, check=True).stdout
        return [json.loads(line) for line in out.decode().splitlines()]

    def freeze(self) -> None:
        """Stop the processes of its engine where they are."""
        for process in self.engine:
            process.send_signal(signal.SIGSTOP)
        for process in self.engine:
            while any(state(task) != "T" for task in Path(f"/proc/{process.pid}/task").glob("*/stat")):
                time.sleep(0.001)

    def thaw(self) -> None:
        """Let them go on."""
        for process in self.engine:
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End every process of it, whatever it does."""
        self._process.kill()
        self._process.join()
        for process in self.engine:
            if process.is_running():
                process.kill()

    def get(self, path: str) -> str:
        """Return what the node answers."""
        with urllib.request.urlopen(self.reported["listening"] + path, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    def metric(self, *names: str) -> float:
        """Return the sum of metrics of one moment, over their labels."""
        shown, total = self.get("/metrics"), 0.0
        for name in names:
            found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", shown, re.MULTILINE)
            assert found, f"{self.name} has no metric {name}"
            total += sum(map(float, found))
        return total

    def emptied(self) -> None:
        """Wait until it has no request, and all its blocks are free."""
        until(lambda: self.metric("asyncfabric_node_inside_requests") == 0)
        until(lambda: self.metric("asyncfabric_kv_free_pages") == self.blocks > 0)


class Cluster:
    """Node processes in a folder of their own, behind one router."""

    def __init__(
        self,
        folder: Path,
        step_s: float = 0.1,
        patience: str = "60s",
        served: Served = ARITHMETIC,
        blocks: int = 96,
    ) -> None:
        """Start directory and router; a step of an arithmetic engine takes `step_s` at least, and it has `blocks`."""
        self.folder, self._served = folder, served
        self._arithmetic = {"ARITHMETIC_STEP_S": str(step_s), "ARITHMETIC_BLOCKS": str(blocks)}
        self.nodes: dict[str, NodeProcess] = {}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(served.described))
        self.start("directory", "dir")
        self.nodes["dir"].ready()
        self.start("router", "router", "--cluster-directory", self.link, "--cluster-patience", patience)

    @property
    def link(self) -> str:
        """Where the directory is reached."""
        return self.nodes["dir"].reported["link"]

    def start(self, role: str, name: str, *more: str) -> None:
        """Start a node; its `ready` waits for it."""
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
        # vLLM leaves sockets and files in the folder for temporary files when it is killed.
        self.nodes[name] = NodeProcess(self.folder, name, words, self._arithmetic | {"TMPDIR": str(self.folder)})

    def engine(self, role: str, name: str, **arguments: Any) -> None:
        """Start a node with vLLM in it, by engine arguments beside those of all nodes."""
        model, described = str(self.folder / "model"), json.dumps(self._served.arguments | arguments)
        words = ["--engine", "vllm", "--model-path", model, "--engine-args", described]
        self.start(role, name, "--cluster-directory", self.link, *words)

    def ready(self, *names: str) -> None:
        """Wait until these nodes listen, and all routers know them."""
        for name in names:
            self.nodes[name].ready()
        for router in [node for node in self.nodes.values() if node.role == "router" and node.reported]:
            for role in ("prefill", "decode"):
                shown = f"asyncfabric_router_{role}_nodes"
                count = sum(1 for name in names if self.nodes[name].role == role)
                until(lambda router=router, shown=shown, count=count: router.metric(shown) >= count)

    def connect(
        self, prompt: list[int], count: int, *, router: str = "router", **fields: Any
    ) -> http.client.HTTPConnection:
        """Send a request to a router; return the connection that its answer comes by."""
        body = {
            "model": "asyncfabric-random",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
        }
        address = urlsplit(self.nodes[router].reported["listening"])
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE_S)
        content = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, **fields}), content)
        return connection

    def ask(self, prompt: list[int], count: int, *, router: str = "router", **fields: Any) -> str:
        """Return a router's answer."""
        connection = self.connect(prompt, count, router=router, **fields)
        try:
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, f"{answer.status}: {text}"
            return str(json.loads(text)["choices"][0]["text"])
        finally:
            connection.close()

    def ask_beside(self, prompt: list[int], count: int) -> Callable[[], str]:
        """Ask in a thread; returns what waits for the answer."""
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(self.ask(prompt, count)))
        thread.start()

        def wait() -> str:
            thread.join(PATIENCE_S)
            return found[0]

        return wait

    def in_middle(self, tokens: int = 3) -> str:
        """Wait until an answer has some tokens; returns the name of the node that gives it."""
        found: list[str] = []

        def look() -> bool:
            rows = json.loads(self.nodes["router"].get("/requests"))["requests"]
            found.extend(str(row["decode"]) for row in rows if row["tokens"] >= tokens)
            return bool(found)

        until(look)
        return found[0]

    def record(self, picture: Path, seconds: int, ask: Callable[[], object]) -> list[dict[str, Any]]:
        """Record all nodes while `ask` is called again and again; return what Perfetto draws with a duration."""
        where = ("--directory", self.nodes["dir"].reported["listening"])
        words = ("trace", "record", *where, "--seconds", f"{seconds}s", "-o", str(picture))
        recording = subprocess.Popen([sys.executable, "-P", "-c", RUN, *words])
        while recording.poll() is None:
            ask()
        assert recording.returncode == 0
        return [event for event in json.loads(picture.read_text())["traceEvents"] if event["ph"] == "X"]

    def close(self) -> None:
        """End every process that was started, and the engines of those that were killed."""
        for node in self.nodes.values():
            node.end()


def preload(served: Served = ARITHMETIC) -> None:
    """Have one process import vLLM, of which engines and nodes are forked; before the first of them."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    multiprocessing.get_context("forkserver").set_forkserver_preload([*served.preloaded, *SERVICES])


def state(stat: Path) -> str:
    """Return the state of a thread, T for one that is stopped."""
    return stat.read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


@contextmanager
def open_cluster(prefill: list[str], decode: list[str], **options: Any) -> Iterator[Cluster]:
    """Hold a cluster of these nodes open."""
    folder = Path(tempfile.mkdtemp(prefix="af", dir="/tmp"))
    cluster: Cluster | None = None
    try:
        cluster = Cluster(folder, **options)
        for role, names in (("prefill", prefill), ("decode", decode)):
            for name in names:
                cluster.engine(role, name)
        cluster.ready("router", *prefill, *decode)
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(folder)


def texts_alone(prompts: list[list[int]], count: int) -> list[str]:
    """Return the texts that one engine alone gives."""
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1) as pool:
        found = pool.apply(generate, (prompts, count))
    return [bytes(tokens).decode(errors="replace") for tokens in found]


def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the tokens that one engine alone gives; in a process that has imported vLLM."""
    import model

    return [model.generate(prompt, count, 16, 256) for prompt in prompts]


def serve(words: list[str], environment: dict[str, str], out: str, log: str) -> None:
    """Be a node; in its process, which does not outlive the one that it was forked from."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for path, descriptor in ((out, 1), (log, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(environment)
    tempfile.tempdir = None  # found anew, by TMPDIR
    sys.argv = ["asyncfabric", *words]
    from asyncfabric_services.cli import main

    main()
