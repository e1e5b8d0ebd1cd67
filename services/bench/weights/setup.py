"""A measured update: coordinator, trainers and receivers as processes, and the calls that bring versions through them.

`bench weights` and `plan calibrate` measure the same setup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from asyncfabric.weights.update import COORDINATOR, receiver_name, trainer_name
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import Process


class WeightsSetup:
    """The processes, and the versions that they went through.

    Attributes:
        started: all processes by name, that of several trainers by the first one; trainers, receivers: names of those.
        moved: bytes of weights that the last update brought.
    """

    def __init__(
        self, started: dict[str, Process], trainers: list[str], receivers: list[str], copies: int, together: int
    ) -> None:
        """Begin with processes that have joined.

        Each byte that trainers send ends in `copies` replicas; `together` trainers share a process.
        """
        self.started = started
        self.trainers = trainers
        self.receivers = receivers
        self.moved: int = 0
        self._copies = copies
        self._publish = "publish" if together == 1 else "publish_all"
        self._version = 0

    @property
    def roles(self) -> dict[str, list[str]]:
        """Return the names of all processes by what they are."""
        return {"trainers": self.trainers, "receivers": self.receivers, "coordinator": [COORDINATOR]}

    def update(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Bring one version everywhere; returns the coordinator's report and the trainers'."""
        self._version += 1
        for name in (COORDINATOR, *self.trainers):
            self.started[name].start("update" if name == COORDINATOR else self._publish, version=self._version)
        reported = self.started[COORDINATOR].finish()
        found = [self.started[name].finish() for name in self.trainers]
        parts = found if self._publish == "publish" else [part for parts in found for part in parts]
        self.ask(self.receivers, "flip", version=self._version)
        coded = sum(one["plain_bytes"] for part in parts for one in part["codings"] if one["coding"] != "full")
        self.moved = self._copies * (coded + sum(part["stages"]["bytes"] for part in parts))
        return reported, parts

    def nudge(self) -> None:
        """Let every trainer take a small step."""
        self.ask(self.trainers, "nudge", seed=self._version)

    def check(self, seed: int) -> list[str]:
        """Compare what serves with what the reference writes."""
        return list(self.ask(self.receivers, "check", seed=seed).values())

    def ask(self, names: Iterable[str], command: str, **arguments: Any) -> dict[str, Any]:
        """Make the same call in several processes at once."""
        names = list(names)
        for name in names:
            self.started[name].start(command, **arguments)
        return {name: self.started[name].finish() for name in names}


@contextmanager
def open_setup(
    options: Options, model: dict[str, Any], scratch_bytes: int, codings: tuple[str, ...] = (), together: int = 1
) -> Iterator[WeightsSetup]:
    """Start all processes of a model, as `weights_workload.plan_of` takes it, and let them join; ends them after.

    `together`: so many trainers share a process, in host memory and without codings.
    """
    ranks = [trainer_name(rank) for rank in range(model["trainers"])]
    homes = {ranks[first]: ranks[first : first + together] for first in range(0, len(ranks), together)}
    trainers = list(homes)
    receivers = [
        receiver_name(f"replica {replica}", receiver)
        for replica in range(model["replicas"])
        for receiver in range(model["receivers"])
    ]
    rails = {name: [f"cuda:{number}"] for number, name in enumerate(trainers)}
    rails |= {name: [f"cuda:{number - len(receivers)}"] for number, name in enumerate(receivers)}
    with ExitStack() as stack:
        kind = "gpu-weights" if options.on_gpu else "weights"
        started = {
            name: stack.enter_context(
                Process("weights-crowd" if together > 1 and name in homes else kind, name, options.deadline_at)
            )
            for name in (COORDINATOR, *trainers, *receivers)
        }
        setup = WeightsSetup(started, trainers, receivers, model["replicas"] if model.get("chain") else 1, together)
        config = options.engine | {"peer_deadline_host": 30.0}
        for name, process in started.items():
            process.start("open", config=config | ({"rails": rails.get(name, ["cuda:0"])} if options.on_gpu else {}))
        opened = {name: process.finish()["address"] for name, process in started.items()}
        addresses = {one: address for name, address in opened.items() for one in homes.get(name, [name])}
        joining = {"addresses": addresses, "model": model, "scratch_bytes": scratch_bytes}
        for name, process in started.items():
            if together > 1 and name in homes:
                process.start("join_all", names=homes[name], **joining)
            else:
                process.start("join", name=name, codings=codings, **joining)
        for process in started.values():
            process.finish()
        yield setup
