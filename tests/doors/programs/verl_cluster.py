"""verl's own manager, worker groups and rollout workers on Ray; weights go over asyncfabric. One line answers another.

    {"do": "<name of a scenario>"} -> {"ok": true, ...what the scenario saw} or {"error": "..."}

Two trainer ranks hold shards, and their generator of whole tensors is collective; two replicas have one rollout rank
each. Of verl's trainer worker the two methods that call a checkpoint engine stand here: its module needs a library of
data sets. Ends with its input.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = tempfile.mkdtemp(prefix="af-verl-")
os.environ.update(
    ASYNCFABRIC_RAILS="local",
    RAY_TMPDIR=FOLDER,
    RAY_USAGE_STATS_ENABLED="0",
    RAY_prestart_worker_first_driver="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    OMP_NUM_THREADS="1",
)

sys.path.append(str(Path(__file__).parent))

import ray  # noqa: E402
import torch  # noqa: E402
from scenario_lines import serve  # noqa: E402
from verl.checkpoint_engine import (  # noqa: E402
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.utils.distributed import initialize_global_process_group_ray  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.workers.config import CheckpointEngineConfig, RolloutConfig  # noqa: E402

from asyncfabric.integrations.verl import FabricCheckpointEngine  # noqa: E402

MODULE = "asyncfabric.integrations.verl"
CONFIG = CheckpointEngineConfig(
    backend="asyncfabric",
    custom_backend_module=MODULE,
    update_weights_bucket_megabytes=1,
    engine_kwargs={"asyncfabric": {"device": "cpu"}},
)
TRAINERS, ROLLOUTS = 2, 2
SHAPES = {
    "embedding": (3001, 256),  # 3 MB of float32: several buckets
    "matrix": (500, 333),
    "bias": (7,),
    "second": (700, 300),
    "norm": (333,),
}


def digest(tensor: torch.Tensor) -> str:
    bits = hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {bits}"


class TrainerRank(Worker):
    """A trainer rank: shards over gloo, and verl's two methods around a checkpoint engine."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (TRAINERS,))
        self.shards = {
            name: torch.distributed.tensor.distribute_tensor(
                torch.zeros(shape), mesh, [torch.distributed.tensor.Shard(0)]
            )
            for name, shape in SHAPES.items()
        }
        self.sent: dict[str, str] = {}
        self.failing = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int, failing: str) -> None:
        torch.manual_seed(seed)
        self.failing = failing
        for name, shard in self.shards.items():
            whole = torch.randn(SHAPES[name])
            shard.copy_(torch.distributed.tensor.distribute_tensor(whole, shard.device_mesh, shard.placements))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sent = {}
        for number, (name, shard) in enumerate(self.shards.items()):
            if name == self.failing:
                raise RuntimeError("the generator failed")
            whole = shard.full_tensor()  # every rank takes part
            whole = whole.bfloat16() if number % 2 else whole
            self.sent[name] = digest(whole)
            yield name, whole
        for name, tensor in (("scalar", torch.tensor(2.5)), ("empty", torch.zeros(0, 4)), ("t", whole[None].T)):
            self.sent[name] = digest(tensor)
            yield name, tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: Any = None, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(self.weights(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> dict[str, str]:
        return self.sent


class Adapter:
    """In place of an engine's server adapter: keeps digests of what it is given."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.received: dict[str, str] = {}
        self.failing = ""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        self.received = {}
        assert wire_format == "named_tensors"
        async for name, tensor in weights:
            if self.failing == "exit":
                os._exit(1)
            if name == self.failing:
                raise RuntimeError("the adapter failed")
            self.received[name] = digest(tensor)


class RolloutRank(CheckpointEngineWorker):
    """verl's rollout worker, and a look at its adapter."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> dict[str, str]:
        return self.server_adapter.received

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_at(self, rank: int, name: str) -> None:
        self.server_adapter.failing = name if rank == self.rank else ""


class Replica:
    """In place of a rollout server: its workers, and which calls came."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**_: Any) -> None:
            self.calls.append(name)

        return call


def group(kind: type, ranks: int, config: Any) -> Any:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(kind), config=config)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


class Scenarios:
    """What the tests ask for."""

    def __init__(self) -> None:
        self.trainers = group(TrainerRank, TRAINERS, CONFIG)
        self.rollouts = group(RolloutRank, ROLLOUTS, RolloutConfig(name="vllm", mode="async", checkpoint_engine=CONFIG))
        workers = self.rollouts.workers
        self.replicas = [Replica(workers[:1]), Replica(workers[1:])]
        self.manager = CheckpointEngineManager(CONFIG, self.trainers, self.replicas)

    def contract(self) -> dict[str, Any]:
        """What verl asks of a backend, of its class and of ours."""
        ours = CheckpointEngineRegistry.get("asyncfabric")
        names = ("prepare", "build_topology", "finalize", "send_weights", "receive_weights")

        def parameters(kind: type) -> list[list[str]]:
            return [list(inspect.signature(getattr(kind, name)).parameters) for name in names]

        return {
            "registered": ours is FabricCheckpointEngine,
            "subclass": issubclass(ours, CheckpointEngine),
            "ours": parameters(ours),
            "theirs": parameters(CheckpointEngine),
            "small": self.error_of(lambda: CheckpointEngineRegistry.new("asyncfabric", bucket_size=8)),
            "early": self.error_of(lambda: ours(64).init_process_group("a", 0, 1, 0, {})),
        }

    def update(self, seed: int = 1, failing: str = "") -> dict[str, Any]:
        """One update, from the beginning to the end of verl's manager."""
        self.trainers.step(seed, failing)
        metrics = self.manager.update_weights(global_steps=seed)
        return {
            "sent": self.trainers.digests(),
            "received": self.rollouts.digests(),
            "metrics": metrics,
            "calls": self.replicas[0].calls,
        }

    def trainer_fails(self) -> dict[str, Any]:
        return {"error_text": self.error_of(lambda: self.update(2, "second")), **self.update(3)}

    def adapter_fails(self) -> dict[str, Any]:
        self.rollouts.fail_at(1, "bias")
        text = self.error_of(lambda: self.update(4))
        self.rollouts.fail_at(-1, "")
        return {"error_text": text, **self.update(5)}

    def rollout_dies(self) -> dict[str, Any]:
        """A rank of the second replica dies in an update; verl goes on with the first replica."""
        self.rollouts.fail_at(1, "exit")
        began_s = time.monotonic()
        self.trainers.step(6, "")
        futures = self.start()
        texts = [self.error_of(lambda one=one: ray.get(one)) for one in futures]
        seconds = time.monotonic() - began_s
        self.manager.remove_replicas([self.replicas[1]])
        self.trainers.step(7, "")
        self.manager.update_weights(global_steps=7)
        received = ray.get([worker.digests.remote() for worker in self.replicas[0].workers])
        return {"texts": texts, "seconds": seconds, "sent": self.trainers.digests(), "received": received}

    def start(self) -> list[Any]:
        """Begin an update as the manager does, and return what all ranks are to report."""
        self.manager.build_process_group(self.rollouts)
        return [*self.trainers.update_weights(global_steps=6), *self.rollouts.update_weights(global_steps=6)]

    @staticmethod
    def error_of(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


@contextmanager
def cluster() -> Iterator[Scenarios]:
    """Run one raylet on the loopback interface, and leave nothing."""
    ray.init(
        num_cpus=TRAINERS + ROLLOUTS + 1,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield Scenarios()
    finally:
        ray.shutdown()
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    serve(cluster(), FOLDER)
