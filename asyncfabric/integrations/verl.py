"""verl's weights over asyncfabric: the CheckpointEngine "asyncfabric", one in each trainer and rollout rank.

    checkpoint_engine:
      backend: asyncfabric
      custom_backend_module: asyncfabric.integrations.verl
      engine_kwargs: {asyncfabric: {device: cpu}}

Importing this module registers it, as verl does in each of its processes. Written for verl 0.9.1, which has to be
installed. Every trainer rank sends: each tensor comes to all of them, and the buckets are shared out. The thread of
verl's event loop, but for waits. Rails come from ASYNCFABRIC_RAILS, or from `process_fabric.configure()`.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from asyncfabric.blocking import Fabric, Region, open_fabric
from asyncfabric.integrations.process_fabric import config_in_force
from asyncfabric.integrations.weight_stream import ALIGNMENT, BucketReceiver, BucketSender, NamedWeights, WeightPost

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    class CheckpointEngine:
        """A backend of verl."""

    class CheckpointEngineRegistry:
        """The backends of verl."""

        @staticmethod
        def register(backend: str) -> Callable[[type], type]:
            """Return a decorator that registers a class."""
else:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

__all__ = ["FabricCheckpointEngine"]

BACKEND = "asyncfabric"


class FabricCheckpointEngine(CheckpointEngine):
    """The backend "asyncfabric" of one rank; verl makes it."""

    wire_format: str = "named_tensors"

    def __init__(self, bucket_size: int, is_master: bool = False, device: str = "cpu") -> None:
        """Open nothing yet.

        Args:
            bucket_size: bytes of a bucket; each rank has two while an update runs.
            is_master: whether this is trainer rank 0; here all are alike.
            device: of the buckets: "cpu", or "cuda" where all ranks are on one host with a `cuda` rail.

        Raises:
            ValueError: a bucket of fewer than 64 bytes.
        """
        if bucket_size < ALIGNMENT:
            raise ValueError(f"bucket_size must be at least {ALIGNMENT} bytes, got {bucket_size}")
        self.bucket_size: int = bucket_size // ALIGNMENT * ALIGNMENT
        self.is_master: bool = is_master
        self._device = device
        self._stack = ExitStack()
        self._fabric: Fabric | None = None
        self._region: Region | None = None
        self._post: WeightPost | None = None
        self._rank = self._ranks = 0

    def prepare(self) -> dict[str, Any]:
        """Open the fabric, unless it is open; return its address.

        Raises:
            DeviceError: a rail cannot be opened.
        """
        self._let_go()
        if self._fabric is None or self._fabric.closed:
            self._fabric = self._stack.enter_context(open_fabric(config_in_force()))
            atexit.register(self.close)
        return {"address": bytes(self._fabric.address)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`, for each trainer rank and each rollout rank.

        Args:
            actor_wg_world_size: trainer ranks.
            rollout_world_size: rollout ranks of all replicas.
            metadata: what `prepare` returned, trainer ranks first.
        """
        addresses = [one["address"] for one in metadata]
        trainers = {f"trainer-{rank}": addresses[rank] for rank in range(actor_wg_world_size)}
        rollouts = {f"rollout-{rank}": addresses[actor_wg_world_size + rank] for rank in range(rollout_world_size)}
        session = secrets.randbits(62)

        def arguments(mine: dict[str, bytes], others: dict[str, bytes]) -> dict[str, list[Any]]:
            count = len(mine)
            return {
                "name": list(mine),
                "rank": list(range(count)),
                "ranks": [count] * count,
                "session": [session] * count,
                "others": [others] * count,
            }

        return arguments(trainers, rollouts), arguments(rollouts, trainers)

    def init_process_group(self, name: str, rank: int, ranks: int, session: int, others: dict[str, bytes]) -> None:
        """Connect to the ranks of the other side, and make the buckets; arguments as `build_topology` returned them.

        Raises:
            RuntimeError: before `prepare`.
            PeerError: a rank cannot be reached.
            DeviceError: no memory for the buckets.
        """
        if self._fabric is None:
            raise RuntimeError("init_process_group() comes after prepare()")
        self._let_go()
        self._rank, self._ranks = rank, ranks
        self._post = WeightPost(self._fabric, session, name, others)
        self._region = self._fabric.allocate(2 * self.bucket_size, self._device)

    async def send_weights(self, weights: NamedWeights, global_steps: int | None = None) -> dict[str, float]:
        """Send a trainer rank's share of the weights; returns when every rollout rank has all of them.

        Args:
            weights: names and whole tensors, the same at every trainer rank.
            global_steps: of the training; not used.

        Returns:
            A metric: the bytes that this rank sent to each rollout rank.

        Raises:
            RuntimeError: before `init_process_group`.
            PeerError: a rollout rank ended.
            BrokenError: a rollout rank gave the update up.

        Cancellation: the others are notified that the update is given up.
        """
        post, _, region = self._ready()
        sent = await BucketSender(post, region, self.bucket_size, self._rank, self._ranks).send(weights)
        return {f"asyncfabric/sent_bytes/rank_{self._rank}": float(sent)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Iterate over names and tensors; a tensor is overwritten after the next one was asked for.

        Args:
            global_steps: of the training; not used.

        Raises:
            RuntimeError: before `init_process_group`.
            PeerError: a trainer rank ended.
            BrokenError: a trainer rank gave the update up.
            RemoteProtocolError: the trainer ranks' weights differ in names, shapes or order.

        Cancellation: the others are notified that the update is given up.
        """
        post, fabric, region = self._ready()
        async for pair in BucketReceiver(post, fabric, region, self.bucket_size).receive():
            yield pair

    def finalize(self) -> None:
        """Free the buckets; the fabric stays open for the next update."""
        self._let_go()

    def close(self) -> None:
        """Free the buckets and close the fabric; again does nothing. Called at the end of the process, not by verl."""
        self._let_go()
        self._fabric = None
        self._stack.pop_all().close()
        atexit.unregister(self.close)

    def _ready(self) -> tuple[WeightPost, Fabric, Region]:
        if self._post is None or self._fabric is None or self._region is None:
            raise RuntimeError("weights move after init_process_group(), once for each of its calls")
        post, self._post = self._post, None
        return post, self._fabric, self._region

    def _let_go(self) -> None:
        self._post = None
        region, self._region = self._region, None
        if region is not None and not region.released:
            region.release()


CheckpointEngineRegistry.register(BACKEND)(FabricCheckpointEngine)
