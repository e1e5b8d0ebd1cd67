"""Sender: one rank of a training that publishes its weights; rank 0 also plans, and decides about versions.

Event loop's thread.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from asyncfabric import Fabric, FabricConfig, open_fabric
from asyncfabric._groups import beside
from asyncfabric.errors import BrokenError
from asyncfabric.weights.channel import COORDINATOR, receiver_name, trainer_name
from asyncfabric.weights.coordinator.coordinator import WeightCoordinator, open_coordinator
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.plan.planner import CHUNK_BYTES
from asyncfabric.weights.sender.publisher import WeightPublisher, open_publisher
from asyncfabric.weights.sender.version import PublishReport
from asyncfabric.weights.sessions.blueprint import get_blueprint, put_blueprint, put_holdings
from asyncfabric.weights.sessions.join import Join
from asyncfabric.weights.tensors import arrays_of, holdings

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

NamedTensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A module, whose named_parameters() are meant; or tensors by name."""


def tensors_of(named: NamedTensors) -> dict[str, torch.Tensor]:
    """Return tensors by name, without their gradients' graph."""
    if isinstance(named, torch.nn.Module):
        named = named.named_parameters()
    pairs = named.items() if isinstance(named, Mapping) else named
    return {name: tensor.detach() for name, tensor in pairs}


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return what is given, else what torch.distributed says, else (0, 1); raises ValueError for half of it."""
    if (rank is None) != (world is None):
        raise ValueError(f"give both rank and ranks, or neither: {rank}, {world}")
    if rank is None or world is None:
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if group else (0, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
    return rank, world


class WeightSender:
    """One rank of a training; made by `async with open_sender(...)`.

    Attributes:
        rank: of the training.
        plan: what goes where.
    """

    def __init__(self, rank: int, plan: Plan, publisher: WeightPublisher) -> None:
        """Not for users: `async with open_sender(...)`."""
        self.rank: int = rank
        self.plan: Plan = plan
        self._publisher = publisher

    async def publish(self, version: int) -> PublishReport:
        """Bring the weights, as they are now, to every engine as this version; return when it is decided.

        Every rank publishes the same version, later than all before. The weights must not change meanwhile: no
        optimizer's step, no load_state_dict. A forward pass, and a backward pass, may run.

        Raises:
            BusyError: another version is being published.
            BrokenError: the version was aborted; the text says why. Engines keep what they have; publish a later one.

        Cancellation: what was posted drains, and the version is aborted.
        """
        return await self._publisher.publish(version)


@asynccontextmanager
async def open_sender(
    named: NamedTensors,
    join: Join,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    parts: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
    config: FabricConfig | None = None,
    log: Path | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> AsyncIterator[WeightSender]:
    """Open one rank of a training whose weights engines want; returns when the first engine has joined.

    Args:
        named: all parameters of this rank: DTensors as FSDP2 and tensor parallelism make them, or whole tensors.
        join: where the ranks and the engines meet.
        rank: of this process in the training; from torch.distributed where neither this nor `ranks` is given.
        ranks: of the training.
        parts: of plain tensors that are a part: shape of the whole parameter, and where the part begins.
        config: how the fabric is opened; over several hosts name a rail, as `rails=("auto", "tcp:eth0")`.
        log: of rank 0, which decides whether a version serves: the file of its decisions, for a training that goes on
            after a restart; None keeps them as long as this block lasts.
        chunk_bytes: about the most that one piece writes; 64 MiB and more for GPUs.

    Raises:
        ValueError: the parameters do not go into the engine's tensors; the text names the tensor.
        DeviceError: memory cannot be registered.

    Cancellation: what was posted drains (INV-2), the memory is released, then it goes on.
    """
    here, world = rank_and_world(rank, ranks)
    state = tensors_of(named)
    await put_holdings(join, here, holdings(state, here, parts))
    first = await put_blueprint(join, world, chunk_bytes) if here == 0 else ""
    plan, _ = await get_blueprint(join)
    async with open_fabric(config) as fabric:
        if here:
            async with _open_rank(fabric, join, plan, here, state) as sender:
                yield sender
            return
        with tempfile.TemporaryDirectory(prefix="asyncfabric-weights-") as folder:
            async with (
                join.open_channel(COORDINATOR) as channel,
                open_coordinator(channel, plan, log or Path(folder) / "decisions") as coordinator,
                beside() as tasks,
            ):
                tasks.start_soon(_decide, coordinator, [receiver_name(first, one) for one in range(plan.receivers)])
                async with _open_rank(fabric, join, plan, here, state) as sender:
                    yield sender


@asynccontextmanager
async def _open_rank(
    fabric: Fabric, join: Join, plan: Plan, rank: int, state: Mapping[str, torch.Tensor]
) -> AsyncIterator[WeightSender]:
    async with (
        join.open_channel(trainer_name(rank)) as channel,
        open_publisher(fabric, channel, plan, rank, arrays_of(state, rank)) as publisher,
    ):
        yield WeightSender(rank, plan, publisher)


async def _decide(coordinator: WeightCoordinator, first: list[str]) -> None:
    await coordinator.wait_receivers(first)
    async for version in coordinator.offers():
        try:
            await coordinator.update(version)
        except (BrokenError, ValueError) as error:  # the senders raise it, engines keep what they have
            logger.warning("version %d was not committed: %s", version, error)
