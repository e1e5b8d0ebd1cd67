"""One participant of weight updates over links: a trainer, the coordinator, or a replica whose engine steps always.

Commands as JSON lines, one JSON line for each. `arm` chooses a word of the protocol: the process ends, by SIGKILL,
when it is about to state it, or when it has received it and before it does anything about it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import trio
import weight_versions as versions
from json_lines import answer, lines

import asyncfabric as af
from asyncfabric.control import DirectoryClient, LinkChannels, LinkConfig, open_link, serve_directory
from asyncfabric.weights import Relay
from asyncfabric.weights.update import (
    COORDINATOR,
    WEIGHT_CODEC,
    WeightChannel,
    open_coordinator,
    open_publisher,
    open_replica,
    receiver_name,
    trainer_name,
)

PR_SET_PDEATHSIG = 1
ROLES = (COORDINATOR, "trainer", "replica")
REST_SECONDS = 0.01  # between two steps: an update takes many, and whoever shares the machine comes to its turn


class Fate:
    """At which word this process dies."""

    def __init__(self) -> None:
        self.way = self.word = self.other = ""

    def meet(self, way: str, other: str, event: Any) -> None:
        if (way, type(event).__name__) == (self.way, self.word) and self.other in ("", other):
            os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """A channel whose process dies at a word."""

    def __init__(self, inner: WeightChannel, fate: Fate) -> None:
        self._inner = inner
        self._fate = fate

    async def send(self, to: str, message: Any) -> None:
        self._fate.meet("send", to, message)
        await self._inner.send(to, message)

    async def receive(self) -> tuple[str, Any]:
        sender, event = await self._inner.receive()
        self._fate.meet("receive", sender, event)
        return sender, event

    def take_nowait(self) -> list[tuple[str, Any]]:
        found = self._inner.take_nowait()
        for sender, event in found:
            self._fate.meet("receive", sender, event)
        return found


class Party:
    """What every participant can be asked."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    async def arm(self, way: str, word: str, other: str = "") -> dict[str, Any]:
        self._fate.way, self._fate.word, self._fate.other = way, word, other
        return {}


class CoordinatorParty(Party):
    def __init__(self, fate: Fate, coordinator: Any) -> None:
        super().__init__(fate)
        self._coordinator = coordinator

    async def next(self) -> dict[str, Any]:
        return {"version": self._coordinator.begun + 1}

    async def present(self, receivers: list[str]) -> dict[str, Any]:
        """Wait until they are there."""
        await self._coordinator.wait_receivers(receivers)
        return {}

    async def held(self, receivers: list[str]) -> dict[str, Any]:
        """Wait until they hold what was decided last."""
        await self._coordinator.wait_held(receivers, self._coordinator.committed)
        return {"version": self._coordinator.committed}

    async def update(self, version: int) -> dict[str, Any]:
        report = await self._coordinator.update(version)
        links = [[one.sender, one.receiver, one.plain_bytes, one.sent_bytes] for one in report.codings]
        return {"receivers": report.receivers, "links": links}


class TrainerParty(Party):
    def __init__(self, fate: Fate, publisher: Any, shards: dict[str, Any]) -> None:
        super().__init__(fate)
        self._publisher = publisher
        self._shards = shards

    async def publish(self, version: int) -> dict[str, Any]:
        for name, array in self._shards.items():
            array[...] = versions.shard(self._publisher.rank, name, version)
        await self._publisher.publish(version)
        return {}


class ReplicaParty(Party):
    def __init__(self, fate: Fate, replicas: dict[str, Any]) -> None:
        super().__init__(fate)
        self._replicas = replicas
        self._served: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._noted = trio.Event()

    async def step(self, name: str) -> None:
        """Read the weights as an engine does, for ever, and note what they were whenever that changes."""
        replica = self._replicas[name]
        while True:
            version = replica.step_boundary()
            self._note(name, version)
            if not version:
                await replica.wait_changed()
                continue
            await trio.sleep(REST_SECONDS)
            self._note(name, version)

    def _note(self, name: str, version: int) -> None:
        found = (version, versions.digest(self._replicas[name].tensors()) if version else 0)
        if self._served[name][-1:] != [found]:
            self._served[name].append(found)
            self._noted.set()
            self._noted = trio.Event()

    async def until(self, version: int) -> dict[str, Any]:
        """Wait until each receiver serves this version or a later one."""
        while any(not self._served[name] or self._served[name][-1][0] < version for name in self._replicas):
            await self._noted.wait()
        return {}

    async def served(self) -> dict[str, Any]:
        return {"served": self._served}


async def take_part(first: dict[str, Any], link: Any, fate: Fate, stack: AsyncExitStack) -> Party:
    """Open one's part; the channels of the process are open before the others find it."""
    name, channels, plan = (
        first["name"],
        LinkChannels(link, WEIGHT_CODEC),
        versions.plan_for(relay=Relay(*first.get("relay", ()))),
    )
    codings = {"codings": first.get("codings", ()), "coding": "always"}
    client = await stack.enter_async_context(DirectoryClient(link, first["directory"]))
    nursery = await stack.enter_async_context(trio.open_nursery())
    stack.callback(nursery.cancel_scope.cancel)
    party: Party
    if name == COORDINATOR:
        opening = open_coordinator(Mortal(channels.open(COORDINATOR), fate), plan, Path(first["log"]))
        party = CoordinatorParty(fate, await stack.enter_async_context(opening))
        role = COORDINATOR
    else:
        config = af.FabricConfig(rails=("local",), peer_deadline_host=first["deadline"])
        fabric = await stack.enter_async_context(af.open_fabric(config))
        if name.startswith("trainer"):
            role, rank = "trainer", int(name[-1])
            shards = {each: versions.shard(rank, each, 0) for each in versions.NAMES}
            channel = Mortal(channels.open(trainer_name(rank)), fate)
            publisher = await stack.enter_async_context(open_publisher(fabric, channel, plan, rank, shards, **codings))
            party = TrainerParty(fate, publisher, shards)
        else:
            role, replicas = "replica", {}
            for receiver in range(versions.RECEIVERS):
                each = receiver_name(name, receiver)
                channel = Mortal(channels.open(each), fate)
                opened = open_replica(fabric, channel, plan, name, receiver, shadow=first["shadow"], **codings)
                replicas[each] = await stack.enter_async_context(opened)
            party = ReplicaParty(fate, replicas)
            steps = await stack.enter_async_context(trio.open_nursery())
            stack.callback(steps.cancel_scope.cancel)  # before the replicas are left
            for each in replicas:
                steps.start_soon(party.step, each)
    nursery.start_soon(channels.run, client, ROLES)
    await client.register(role, link.address)
    return party


async def main() -> None:
    commands = lines()
    first = json.loads(await anext(commands))
    config = LinkConfig(ipc_folder=first["folder"], heartbeat_s=0.1, peer_deadline_s=30.0)
    async with (
        open_link(first["name"], bind="ipc", config=config) as link,
        AsyncExitStack() as stack,
    ):
        party: Party = Party(Fate())
        if first["name"] == "directory":
            await stack.enter_async_context(serve_directory(link))
        else:
            party = await take_part(first, link, party._fate, stack)
        answer({"address": link.address})
        async for line in commands:
            command = json.loads(line)
            name = command.pop("do")
            if name == "close":
                break
            try:
                result = await getattr(party, name)(**command)
            except (af.FabricError, ValueError) as error:
                result = {"error": type(error).__name__, "text": str(error)}
            answer(result)
    answer({"closed": True})


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)  # no orphan survives the test that started it
    trio.run(main)
