"""A cluster of `asyncfabric serve` processes for tests: started, asked by the openai client, measured, killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes  # pytest's conftest made it importable
import template

from asyncfabric.control import make_keys
from asyncfabric.control.keys import write_keys
from asyncfabric_services.settings.readers import READERS

RUN = (
    "import ctypes; ctypes.CDLL(None).prctl(1, 9); "  # no orphan survives the test that started it
    "from asyncfabric_services.cli import main; main()"
)
TINY = {"MODEL__LAYERS": "3", "MODEL__HIDDEN": "64", "MODEL__QUERY_HEADS": "4", "MODEL__KV_HEADS": "2"}
SMALL = TINY | {"HTTP__PORT": "0", "CACHE__MEMORY": "16MiB", "LOG__FORM": "json", "BATCH__CHUNK_TOKENS": "64"}
MODEL = "asyncfabric-random"
PATIENCE = 90.0
LOOK_S = 0.05  # between two looks at the metrics of a node, which cost it some milliseconds


class Service:
    """One running `asyncfabric serve ROLE`."""

    def __init__(
        self,
        role: str,
        name: str,
        log: Path,
        settings: dict[str, str],
        namespace: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        environment = {f"ASYNCFABRIC_{key}": value for key, value in settings.items()}
        environment = {**os.environ, **environment, **(variables or {})}
        arguments = ["serve", role, "--node-name", name]
        assert template.template is not None, "conftest.py makes it"
        with log.open("ab") as errors:
            self.child = template.template.start(["asyncfabric", *arguments], environment, errors, namespace)
        processes.started.append(self.child.pid)

    def receive(self) -> None:
        """Wait until it listens."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"{self.name} ended: {self.log.read_text()[-3000:]}"
        reported = json.loads(line)
        self.address: str = reported["listening"]
        self.link: str = reported["link"]

    def connect(self) -> socket.socket:
        """Connect to its HTTP endpoint."""
        return socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])), PATIENCE)

    def get(self, path: str) -> str:
        """Return the body of an HTTP answer."""
        with self.connect() as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            return b"".join(iter(lambda: one.recv(65536), b"")).decode().partition("\r\n\r\n")[2]

    def metric(self, name: str) -> float:
        """Return a metric by its name with labels; 0 when nothing was counted yet."""
        lines = self.get("/metrics").splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def until(self, name: str, accepted: Callable[[float], bool]) -> float:
        """Wait until a metric has an accepted value and return it; fails when that does not come."""
        deadline = time.monotonic() + PATIENCE
        while not accepted(now := self.metric(name)):
            assert time.monotonic() < deadline, f"{name} of {self.name} is {now}; log:\n{self.log.read_text()[-3000:]}"
            time.sleep(LOOK_S)
        return now

    def until_no_page_is_out(self) -> None:
        """Wait until every page is free: none held, none in quarantine."""
        self.until("asyncfabric_kv_held_pages", lambda pages: pages == 0)
        self.until("asyncfabric_kv_quarantined_pages", lambda pages: pages == 0)
        assert self.metric("asyncfabric_kv_free_pages") > 0

    def kill(self) -> None:
        """End it without a warning."""
        self.child.kill()
        self.child.wait()
        self.let_go()

    def let_go(self) -> None:
        """Close what this side holds of an ended process; idempotent."""
        assert self.child.stdout is not None
        self.child.stdout.close()

    def end(self) -> int:
        """Ask it to end in good order and return its status."""
        self.child.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Wait until it has ended and return its status."""
        status = self.child.wait(PATIENCE)
        self.let_go()
        return status


class Cluster:
    """A directory, a router and nodes."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        keys = folder / "link.key"
        if not keys.exists():
            write_keys(keys, *make_keys(), frozenset(READERS))
        self.settings = SMALL | {"CLUSTER__BIND": f"ipc://{folder}/ipc/", "CLUSTER__KEYS": str(keys)} | settings
        self.nodes: dict[str, Service] = {}
        self.started: list[Service] = []  # those of earlier lives of a name too

    def start(self, *names: str, **more: str) -> None:
        """Start nodes side by side; `prefill-1` is a prefill node. Returns when all are ready to be asked."""
        self.start_each(dict.fromkeys(names, more))

    def start_each(self, names: Mapping[str, Mapping[str, str]]) -> None:
        """Start nodes side by side, each with settings of its own besides those of the cluster."""
        begun = []
        for name, more in names.items():
            service = self.service(name, self.settings | dict(more))
            self.nodes[name] = service
            begun.append(service)
            self.started.append(service)
        for service in begun:
            service.receive()
        if directories := [name for name in names if name.startswith("directory")]:
            self.settings |= {"CLUSTER__DIRECTORY": ",".join(self[name].link for name in directories)}

    def service(self, name: str, settings: dict[str, str], variables: Mapping[str, str] | None = None) -> Service:
        """Start the process of a node; `variables` of its environment are no settings of ours."""
        return Service(name.partition("-")[0], name, self.folder / f"{name}.log", settings, variables=variables)

    def __getitem__(self, name: str) -> Service:
        return self.nodes[name]

    def until_routed(self, *, prefill: int, decode: int) -> None:
        """Wait until the router sees so many ready nodes."""
        self["router"].until("asyncfabric_router_prefill_nodes", lambda nodes: nodes == prefill)
        self["router"].until("asyncfabric_router_decode_nodes", lambda nodes: nodes == decode)

    def busy_and_other(self, role: str) -> tuple[Service, Service]:
        """Wait until exactly one of the first two nodes of a role holds pages; return it and the other."""
        both = [self[f"{role}-1"], self[f"{role}-2"]]
        deadline = time.monotonic() + PATIENCE
        while sum(held := [node.metric("asyncfabric_kv_held_pages") > 0 for node in both]) != 1:
            assert time.monotonic() < deadline, f"no {role} node is busy alone"
            time.sleep(LOOK_S)
        return both[held.index(True)], both[held.index(False)]

    def end(self, *names: str) -> dict[str, int]:
        """Ask nodes to end in good order, side by side, and return their statuses."""
        for name in names:
            self[name].child.send_signal(signal.SIGTERM)
        return {name: self[name].ended() for name in names}

    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self['router'].address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@contextmanager
def ending(made: Cluster) -> Iterator[None]:
    """End what is left of a cluster."""
    try:
        yield
    finally:
        for service in made.started:
            service.child.kill()
        for service in made.started:
            service.child.wait()
            service.let_go()


@contextmanager
def bare_cluster(folder: Path, *, directory: dict[str, str] | None = None, **settings: str) -> Iterator[Cluster]:
    """Run a directory (and its own settings); nodes that are started later are ended with it."""
    made = Cluster(folder, settings)
    with ending(made):
        made.start("directory", **(directory or {}))
        yield made


@contextmanager
def cluster(folder: Path, *names: str, directory: dict[str, str] | None = None, **settings: str) -> Iterator[Cluster]:
    """Run a cluster with a directory (and its own settings), a router and the named nodes."""
    with bare_cluster(folder, directory=directory, **settings) as made:
        made.start(*names, "router")
        roles = [name.partition("-")[0] for name in names]
        made.until_routed(prefill=roles.count("prefill"), decode=roles.count("decode"))
        yield made


def ask(router: Service, prompt: str, count: int) -> socket.socket:
    """Ask for a greedy stream and return the connection: closing it is leaving. It ends after the answer."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    one = socket.create_connection(("127.0.0.1", int(router.address.rpartition(":")[2])), PATIENCE)
    one.sendall((head + body).encode())
    return one


def complete(client: Any, prompt: str, count: int, **more: Any) -> str:
    """Return the text of a greedy completion."""
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=count, temperature=0, **more)
    return str(answer.choices[0].text)


class OneProcess:
    """The same model in this process, to compare with."""

    def __init__(self) -> None:
        import torch

        from asyncfabric_services.runner.model import ModelChoice, load_model
        from asyncfabric_services.runner.runner import Runner

        torch.set_num_threads(1)
        choice = ModelChoice(layers=3, hidden=64, query_heads=4, kv_heads=2)
        loaded = load_model(choice, page_tokens=16)
        self.pages = 128
        memory = torch.zeros(loaded.shape.pool_bytes(self.pages), dtype=torch.uint8)
        self.runner = Runner(loaded, loaded.shape.view(memory, self.pages))

    def complete(self, prompt: str, count: int) -> str:
        """Return the text of a greedy completion."""
        from asyncfabric_services.runner.batch import TokenSpan

        tokens, table = list(prompt.encode()), range(self.pages)
        stated = [int(self.runner.prefill(tokens, table, chunk_tokens=256).numpy().argmax())]
        while len(stated) < count:
            span = TokenSpan([stated[-1]], len(tokens) + len(stated) - 1, table)
            stated.append(int(self.runner.step([span])[0].numpy().argmax()))
        return bytes(stated).decode(errors="replace")
