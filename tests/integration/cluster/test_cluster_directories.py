"""A cluster with two directories over a real etcd: each is killed under load, etcd is away, and no request fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import etcd
import pytest
from cluster import PATIENCE, Cluster, Service, complete, ending

from asyncfabric.control import make_keys
from asyncfabric.control.keys import write_keys
from asyncfabric_services.settings.readers import READERS

PROMPT, TOKENS = "two directories, one table", 24
READY_S = 30.0


class Load:
    """Requests one after the other on a few threads, until the scope is left; wrong answers and errors are kept."""

    def __init__(self, made: Cluster, right: str) -> None:
        self.answered, self.failures = 0, list[str]()
        self._made, self._right = made, right
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 4) -> None:
        """Wait until so many more were answered."""
        deadline, goal = time.monotonic() + PATIENCE, self.answered + count
        while self.answered < goal:
            assert time.monotonic() < deadline, f"{self.answered} of {goal} answers; failures: {self.failures}"
            time.sleep(0.02)

    def _ask(self) -> None:
        with self._made.client() as client:
            while not self._stop.is_set():
                try:
                    answer = complete(client, PROMPT, TOKENS)
                    if answer != self._right:
                        self.failures.append(f"wrong answer {answer!r}")
                except Exception as error:
                    self.failures.append(repr(error))
                self.answered += 1


def until_ready(*services: Service) -> None:
    deadline = time.monotonic() + READY_S
    for service in services:
        while (health := json.loads(service.get("/health")))["state"] != "ready":
            assert time.monotonic() < deadline, f"{service.name}: {health}"
            time.sleep(0.02)


def names(directory: Service) -> set[str]:
    return {row["name"] for row in json.loads(directory.get("/nodes"))["nodes"]} - {directory.name}


def until_shown(directory: Service, expected: set[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while (shown := names(directory)) != expected:
        assert time.monotonic() < deadline, f"{directory.name} shows {shown}, not {expected}"
        time.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[etcd.Etcd]:
    made = etcd.Etcd(tmp_path)
    yield made
    made.kill()


@pytest.mark.slow
def test_directories_are_killed_under_load_and_nothing_is_lost(tmp_path: Path, server: etcd.Etcd) -> None:
    made = Cluster(tmp_path, {})
    places = {
        f"directory-{number}": {
            "CLUSTER__BIND": f"ipc://{tmp_path}/ipc/d{number}.sock",
            "DIRECTORY__STORE": server.address,
        }
        for number in (1, 2)
    }
    with ending(made):
        made.start_each(places)
        nodes = ("prefill-1", "decode-1", "decode-2", "router")
        made.start(*nodes)
        made.until_routed(prefill=1, decode=2)
        for name in places:
            until_shown(made[name], set(nodes))
        members = [made[name] for name in nodes]
        with made.client() as client:
            right = complete(client, PROMPT, TOKENS)
        with Load(made, right) as load:
            made["directory-1"].kill()
            until_ready(*members)
            load.more()
            until_shown(made["directory-2"], set(nodes))
            server.kill()
            load.more()
            assert names(made["directory-2"]) == set(nodes)  # it keeps its view
            until_ready(*members)  # and so do the nodes
            assert "store" in json.loads(made["directory-2"].get("/health"))["missing"]
            assert server.start()

            made.start_each({"directory-1": places["directory-1"]})
            until_shown(made["directory-1"], set(nodes))
            made["directory-2"].kill()
            until_ready(*members)
            load.more()
        assert load.failures == []
        made["decode-2"].kill()
        until_shown(made["directory-1"], {"prefill-1", "decode-1", "router"})


def test_a_directory_with_another_key_is_refused_by_name(tmp_path: Path, server: etcd.Etcd) -> None:
    made = Cluster(tmp_path, {"DIRECTORY__STORE": server.address})
    write_keys(tmp_path / "other.key", *make_keys(), frozenset(READERS))
    with ending(made):
        made.start("directory-1")
        other = made.service("directory-2", made.settings | {"CLUSTER__KEYS": str(tmp_path / "other.key")})
        made.started.append(other)
        assert other.ended() != 0
        log = other.log.read_text()
        assert "directory-2 has another secret than directory-1" in log and "the same key file" in log
