"""A measured process of an update: the coordinator, one trainer, or one receiver of a replica; each has a fabric.

The trainers also copy with bare memcpy loops: as many copiers at once as there are trainers.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import trio

import asyncfabric as af
from asyncfabric.bench import limits
from asyncfabric.control import FabricChannels
from asyncfabric.weights import ReplicaMemory, execute
from asyncfabric.weights.update import (
    COORDINATOR,
    WEIGHT_CODEC,
    WeightChannel,
    WeightCoordinator,
    WeightPublisher,
    WeightReplica,
    open_coordinator,
    open_publisher,
    open_replica,
    receiver_of,
    trainer_name,
)
from asyncfabric_services.bench.transfers.fabric_worker import FabricWorker
from asyncfabric_services.bench.weights.workload import plan_of, rows_at, rows_of


class WeightsWorker(FabricWorker):
    """One participant; opened by `do_open` and `do_join`.

    Attributes:
        device: where its weights are.
    """

    device: str = "cpu"

    _coordinator: WeightCoordinator
    _publisher: WeightPublisher
    _replica: WeightReplica

    async def beside(self) -> None:
        """Keep the task in which the own part lives: it ends in the task that it began in."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    async def do_join(
        self,
        name: str,
        addresses: dict[str, str],
        model: dict[str, Any],
        scratch_bytes: int,
        codings: Sequence[str] = (),
    ) -> None:
        """Take one's part: by name."""
        self._model = model
        self._codings = codings
        self._plan = plan_of(**model)
        self._receivers = [other for other in addresses if "/" in other]
        known = {other: af.FabricAddress.from_bytes(bytes.fromhex(each)) for other, each in addresses.items()}
        await self._nursery.start(
            self._live, name, FabricChannels(self._fabric, WEIGHT_CODEC, known).open(name), scratch_bytes
        )

    async def _live(
        self, name: str, channel: WeightChannel, scratch_bytes: int, task_status: trio.TaskStatus[None]
    ) -> None:
        async with AsyncExitStack() as stack:
            if name == COORDINATOR:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                log = Path(folder) / "decisions"
                self._coordinator = await stack.enter_async_context(open_coordinator(channel, self._plan, log))
            elif "/" in name:
                replica, receiver = receiver_of(name)
                opening = open_replica(
                    self._fabric, channel, self._plan, replica, receiver, codings=self._codings, device=self.device
                )
                self._replica = await stack.enter_async_context(opening)
            else:
                rank = next(rank for rank in range(self._plan.trainers) if trainer_name(rank) == name)
                self._rows = rows_at(rank, self._plan.trainers, self._model["side"])
                self._shards = {f"matrix {number}": self._part(number, 0) for number in range(self._model["matrices"])}
                self._publisher = await stack.enter_async_context(
                    open_publisher(
                        self._fabric,
                        channel,
                        self._plan,
                        rank,
                        self._shards,
                        scratch_bytes=scratch_bytes,
                        codings=self._codings,
                    )
                )
            task_status.started()
            await trio.sleep_forever()

    def _part(self, number: int, seed: int) -> Any:
        return self._values(number, *self._rows, seed)

    def _values(self, number: int, begin: int, end: int, seed: int) -> Any:
        """Return rows of a matrix, in host memory."""
        return rows_of(number, self._model["side"], begin, end, seed, self._model["form"])

    async def do_train(self, seed: int) -> None:
        """Take other weights."""
        for number in range(self._model["matrices"]):
            self._shards[f"matrix {number}"][...] = self._part(number, seed)

    async def do_nudge(self, seed: int) -> None:
        """Take a small step: the lowest bit of 2 % of the weights, as bfloat16, turns."""
        random = np.random.default_rng(seed)
        for array in self._shards.values():
            flat = array.reshape(-1)
            bits, lowest = (flat.view(np.uint32), 1 << 16) if flat.dtype == np.float32 else (flat, 1)
            bits[random.integers(0, flat.size, flat.size // 50)] ^= bits.dtype.type(lowest)

    async def do_update(self, version: int) -> dict[str, Any]:
        """As the coordinator: one update, once everybody is there."""
        await self._coordinator.wait_receivers(self._receivers)
        return asdict(await self._coordinator.update(version))

    async def do_publish(self, version: int) -> dict[str, Any]:
        """As a trainer: one's part of an update."""
        return asdict(await self._publisher.publish(version))

    async def do_flip(self, version: int) -> int:
        """As a receiver: let a version serve."""
        await self._replica.wait_version(version)
        return self._replica.step_boundary()

    async def do_check(self, seed: int) -> str:
        """As a receiver: compare every tensor with what the reference executor makes of whole matrices; "" is good."""
        model, replica = self._model, self._replica
        tensors = replica.tensors()
        one = {**model, "trainers": 1, "replicas": 1, "matrices": 2}
        for number in range(0, model["matrices"], 2):
            plan = plan_of(**one)
            memory = ReplicaMemory(plan)

            def whole(_: int, name: str, first: int = number) -> Any:
                return self._values(first + int(name.split()[1]), 0, model["side"], seed)

            execute(plan, whole, memory)
            for (_, receiver, name), wanted in memory.tensors.items():
                word, index, *rest = name.replace("_", " _", 1).split(" ")
                mine = f"{word} {number + int(index)}{''.join(rest)}"
                if receiver == replica.receiver and mine in tensors and not same_bytes(tensors[mine], wanted):
                    return f"{mine} of {replica.name}/{receiver} is wrong"
        return ""

    async def do_forget_peak(self) -> int:
        """Forget the highest memory so far; return what there is now, in bytes."""
        forget_peak()
        return resident_bytes("VmRSS")

    async def do_peak(self) -> int:
        """Return the highest memory since `do_forget_peak`, in bytes, as the kernel counted it."""
        return resident_bytes("VmHWM")

    async def do_cpu(self) -> float:
        """Return the seconds that all threads of this process have computed."""
        return time.process_time()

    async def do_threads(self) -> dict[str, float]:
        """Return the seconds computed so far: by the event loop, by the engine, and by what converts and hashes."""
        loop, engine = thread_seconds()
        return {"loop": loop, "engine": engine, "work": time.process_time() - loop - engine}

    async def do_prepare_copy(self, length_bytes: int) -> None:
        """As a trainer: memory for the bare copies."""
        self._copy = (np.ones(length_bytes, np.uint8), np.zeros(length_bytes, np.uint8))

    async def do_copy(self, limit: Any, op_bytes: int, count: int) -> float:
        """As a trainer: copy with one thread, as others do at the same time; return seconds."""
        return limits.copy_seconds(limit, self._copy[1], self._copy[0], op_bytes, count)


def same_bytes(tensor: Any, wanted: Any) -> bool:
    """Compare a served tensor, wherever it is, with an array."""
    return np.array_equal(tensor if isinstance(tensor, np.ndarray) else tensor.cpu().numpy(), wanted)


def forget_peak() -> None:
    """Let the kernel count the highest resident memory of this process from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(which: str) -> int:
    """Return VmRSS or VmHWM of this process, less what is counted twice: the engine maps its own memory two times."""
    once = _kilobytes("/proc/self/smaps_rollup", "Pss_Shmem")
    twice = _kilobytes("/proc/self/status", "RssShmem")
    return (_kilobytes("/proc/self/status", which) - (twice - once)) * 1024


def thread_seconds() -> tuple[float, float]:
    """Return the seconds that the first thread of this process and those of its engines have computed."""
    loop = engine = 0
    for task in Path("/proc/self/task").iterdir():
        spent = int((task / "schedstat").read_text().split()[0])
        if int(task.name) == os.getpid():
            loop = spent
        elif (task / "comm").read_text().startswith("af-"):
            engine += spent
    return loop / 1e9, engine / 1e9


def _kilobytes(path: str, name: str) -> int:
    return int(next(line for line in Path(path).read_text().splitlines() if line.startswith(name + ":")).split()[1])
