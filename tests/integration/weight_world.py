"""A training, its coordinator and its replicas as processes of weight_party, any of which dies at a chosen word."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from processes import Process
from weight_versions import RECEIVERS, digests

from asyncfabric.weights.update import receiver_name

DEADLINE_S = 10.0
TRAINERS = ("trainer-0", "trainer-1")
Served = list[int]


class WeightWorld:
    """The processes of a training, its coordinator and replicas."""

    def __init__(self, folder: Path, stack: ExitStack, replicas: dict[str, dict[str, Any]], **options: Any) -> None:
        """Start all; `replicas` by name with options of their own, see weight_party."""
        self.replicas = replicas
        self.links: list[Any] = []  # of the last update: sender, receiver, bytes, bytes that were sent
        self._options = options
        self.log = folder / "decisions"
        self.nodes: dict[str, Process] = {}
        self._stack = stack
        self._folder = str(folder / "s")
        self._directory = ""
        self._begin("directory")
        self._directory = self.nodes["directory"].receive()["address"]
        self.start("coordinator", *TRAINERS, *replicas)

    def __getitem__(self, name: str) -> Process:
        return self.nodes[name]

    def _begin(self, name: str) -> None:
        node = self.nodes[name] = self._stack.enter_context(Process("weight_party.py"))
        node.send(
            name=name,
            folder=self._folder,
            directory=self._directory,
            log=str(self.log),
            deadline=DEADLINE_S,
            **{"shadow": True, **self._options, **self.replicas.get(name, {})},
        )

    def start(self, *names: str) -> None:
        for name in names:
            self._begin(name)
        for name in names:
            self[name].receive()
        self["coordinator"].ask("present", receivers=self.everybody)

    @property
    def everybody(self) -> list[str]:
        """All receivers."""
        return [receiver_name(name, receiver) for name in self.replicas for receiver in range(RECEIVERS)]

    def begin(self) -> int:
        """Let an update begin; returns its version."""
        version: int = self["coordinator"].ask("next")["version"]
        for name in TRAINERS:
            self[name].send(do="publish", version=version)
        self["coordinator"].send(do="update", version=version)
        return version

    def bring(self) -> int:
        """Bring a version everywhere."""
        version = self.begin()
        for name in ("coordinator", *TRAINERS):
            answer = self[name].receive()
            assert "error" not in answer, (name, answer)
            self.links = answer.get("links", self.links)
        for name in self.replicas:
            self[name].ask("until", version=version)
        return version

    def die(self, victim: str, way: str, word: str, other: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Let an update begin in which somebody dies; returns its version and how it ended for the others."""
        self[victim].ask("arm", way=way, word=word, other=other)
        version = self.begin()
        assert self[victim].child.wait(60) == -signal.SIGKILL
        return version, {name: self[name].receive() for name in ("coordinator", *TRAINERS) if name != victim}

    def decided(self) -> list[int]:
        records = [json.loads(line)["record"] for line in self.log.read_text().splitlines()]
        return [record["version"] for record in records if record["kind"] == "commit"]

    def all_served(self) -> dict[str, Served]:
        """Return what each receiver served since its process began, 0 for none, after checking each byte of it."""
        found: dict[str, Served] = {}
        decided = set(self.decided())
        for replica in self.replicas:
            for name, versions in self[replica].ask("served")["served"].items():
                for version, digest in versions:
                    assert version == 0 or version in decided, (name, versions, "serves what was not decided")
                    assert version == 0 or digest == digests(version, replica)[name], (name, version, "is a mixture")
                found[name] = [version for version, _ in versions]
                served = [version for version in found[name] if version]
                assert served == sorted(served), (name, versions, "a version went back")
        return found


@contextmanager
def open_world(folder: Path, replicas: dict[str, dict[str, Any]], **options: Any) -> Iterator[WeightWorld]:
    """Run them: version 1 is everywhere at first, and in the end another one comes everywhere."""
    with ExitStack() as stack:
        made = WeightWorld(folder, stack, replicas, **options)
        made.bring()
        yield made
        made.bring()
        made.all_served()
        for node in made.nodes.values():
            node.send(do="close")
        for node in made.nodes.values():
            assert node.receive() == {"closed": True}
            assert node.child.stdin is not None
            node.child.stdin.close()
            assert node.child.wait(60) == 0
