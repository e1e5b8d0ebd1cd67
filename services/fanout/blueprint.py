"""What everybody has to know before an update: plan, model, layout of replicas. Trainers send it, rollouts ask for it.

Kept by the coordinator, beside its decision log, so that it is there after a restart of anybody. Travels in parts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import trio

from asyncfabric.actors import Actor, Message, Node, Reference, handles
from asyncfabric.weights import LocalTensor, ReplicaLayout
from asyncfabric.weights.update import WeightCoordinator

WEIGHT_CHANNEL = "weights"
"""Of the links, on which the messages of updates go."""
COORDINATOR_ACTOR = "weights"
PART_BYTES = 256 << 10


class FanoutBlueprint(msgspec.Struct, frozen=True):
    """One training's weights and who serves them.

    Attributes:
        plan: `asyncfabric.weights.to_bytes` of the plan without replicas.
        config: the model's transformers configuration as JSON.
        layout: of each replica.
        tensors: for each rank of a replica its tensors.
    """

    plan: bytes
    config: str
    layout: ReplicaLayout
    tensors: list[dict[str, LocalTensor]]

    def model_config(self) -> Any:
        """Return the configuration as transformers has it."""
        from transformers import AutoConfig

        fields = json.loads(self.config)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


class BlueprintPart(Message[bool]):
    """A part of the trainer's blueprint; answered with whether all of it is there."""

    offset: int
    total: int
    data: bytes


class AskForBlueprint(Message[bytes]):
    """For the blueprint's bytes from here on; answered when there is one. Empty at its end."""

    offset: int


class Next(Message[int]):
    """For the number of a version that nobody has begun; 0 while the coordinator is not open."""


class BlueprintStore:
    """The coordinator's copy.

    Args:
        path: of the file that keeps it.

    Raises:
        OSError: the file is there and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.coordinator: WeightCoordinator | None = None
        self._path = path
        self._data = path.read_bytes() if path.exists() else b""
        self._coming = bytearray()
        self._there = trio.Event()
        if self._data:
            self._there.set()

    async def blueprint(self) -> FanoutBlueprint:
        """Return the blueprint, when there is one.

        Cancellation: only this wait ends.
        """
        await self._there.wait()
        return msgspec.msgpack.decode(self._data, type=FanoutBlueprint)

    async def part(self, offset: int) -> bytes:
        """Return a part of its bytes, when there is one.

        Cancellation: only this wait ends.
        """
        await self._there.wait()
        return self._data[offset : offset + PART_BYTES]

    def take(self, part: BlueprintPart) -> bool:
        """Take a part; raises ValueError when it is another training's than the one that is known."""
        if part.offset == 0:
            self._coming.clear()
        if part.offset != len(self._coming):
            raise ValueError(f"part {part.offset} of the blueprint does not follow {len(self._coming)} bytes")
        self._coming += part.data
        if len(self._coming) < part.total:
            return False
        if self._data and bytes(self._coming) != self._data:
            raise ValueError(
                f"this trainer has another model or another layout than {self._path}: begin a new log for it"
            )
        if not self._data:
            self._data = bytes(self._coming)
            _keep(self._path, self._data)
            self._there.set()
        return True


class CoordinatorActor(Actor):
    """Where trainers and rollouts ask."""

    concurrency: ClassVar[int] = 256

    def __init__(self, store: BlueprintStore) -> None:
        self._store = store

    @handles(BlueprintPart)
    async def take(self, message: BlueprintPart) -> bool:
        """Take a part."""
        return self._store.take(message)

    @handles(AskForBlueprint)
    async def ask(self, message: AskForBlueprint) -> bytes:
        """Give a part."""
        return await self._store.part(message.offset)

    @handles(Next)
    async def next(self, message: Next) -> int:
        """Return which version may be begun."""
        coordinator = self._store.coordinator
        return 0 if coordinator is None else coordinator.begun + 1


async def send_blueprint(node: Node, to: Reference, blueprint: FanoutBlueprint) -> None:
    """Send it to the coordinator; raises ActorError when it is lost meanwhile or has another one.

    Cancellation: it forgets the parts that came.
    """
    data = msgspec.msgpack.encode(blueprint)
    for offset in range(0, len(data), PART_BYTES):
        await node.ask(to, BlueprintPart(offset, len(data), data[offset : offset + PART_BYTES]))


async def ask_blueprint(node: Node, of: Reference) -> FanoutBlueprint:
    """Return the coordinator's blueprint, when it has one; raises ActorError when it is lost meanwhile.

    Cancellation: only this wait ends.
    """
    data = bytearray()
    while part := await node.ask(of, AskForBlueprint(len(data))):
        data += part
    return msgspec.msgpack.decode(bytes(data), type=FanoutBlueprint)


def _keep(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
