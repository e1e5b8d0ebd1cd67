"""Sender: one rank of a training that publishes its weights to the layouts of its engines.

Event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import torch

from asyncfabric import FabricConfig, open_fabric
from asyncfabric._groups import beside, unwrapped
from asyncfabric.errors import BrokenError, BusyError, FabricError
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.plan.planner import CHUNK_BYTES
from asyncfabric.weights.sender.version import PublishReport, merged
from asyncfabric.weights.sessions.blueprint import get_blueprint, put, put_holdings, read
from asyncfabric.weights.sessions.directory import Meeting, attend
from asyncfabric.weights.sessions.engines import Engines
from asyncfabric.weights.sessions.join import Join
from asyncfabric.weights.sessions.layouts import DESERTED_S, Layouts
from asyncfabric.weights.tensors import arrays_of, holdings

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

BOUNDARY_S = 30.0
"""So long a version waits for an engine that reaches no step boundary while others could take the version."""

GPU_CHUNK_BYTES = 64 << 20
"""Of pieces out of a GPU's memory, where a launch costs more beside the copy than a call in host memory does."""

LOOK_S = 0.1
"""Between two looks at engines that are late."""

NamedTensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A module, whose named_parameters() are meant; or tensors by name."""


def tensors_of(named: NamedTensors) -> dict[str, torch.Tensor]:
    """Return tensors by name, without their gradients' graph."""
    if isinstance(named, torch.nn.Module):
        named = named.named_parameters()
    pairs = named.items() if isinstance(named, Mapping) else named
    return {name: tensor.detach() for name, tensor in pairs}


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return what is given, else what torch.distributed states, else (0, 1); raises ValueError for half of it."""
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
    """

    def __init__(self, join: Join, layouts: Layouts, engines: Engines | None, world: int, boundary_s: float) -> None:
        """Not for users: `async with open_sender(...)`."""
        self.rank: int = layouts.rank
        self._join = join
        self._layouts = layouts
        self._engines = engines
        self._world = world
        self._boundary_s = boundary_s
        self._publishing = 0

    @property
    def plan(self) -> Plan:
        """What goes where in engines that are laid out as the first one."""
        return self._layouts.plans[0]

    async def publish(self, version: int) -> PublishReport:
        """Bring the weights, as they are now, to every engine as this version; return when it is decided.

        Every rank publishes the same version, later than all before. The weights must not change meanwhile: no
        optimizer's step, no load_state_dict. A forward pass, and a backward pass, may run.

        A version is whole for engines of each layout by itself: what goes wrong for some is in `failures` of the
        report, and the others have it. An engine that reaches no step boundary for `boundary_s` while another one could
        take the version is left out of this one, and of later ones until it does.

        Raises:
            BusyError: another version is being published.
            BrokenError: the version was aborted for every engine, or rank 0 is lost; the text states why. Engines keep
                what they have; publish a later one.

        Cancellation: what was posted drains, and the version is aborted where it is not decided.
        """
        if self._publishing:
            raise BusyError(f"version {self._publishing} is being published")
        self._publishing = version
        try:
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    if self._engines is None:
                        tasks.start_soon(self._watch_rank_0)
                    report = await self._publish(version, await self._chosen(version))
                    tasks.cancel_scope.cancel()
            return report
        finally:
            self._publishing = 0

    async def _watch_rank_0(self) -> None:
        await (await self._layouts.publisher(0)).wait_deserted(DESERTED_S)
        raise BrokenError(
            "rank 0 of the training is lost, and the coordinator with it",
            remedy="start all ranks again; engines keep the version that they have",
        )

    async def _chosen(self, version: int) -> list[int]:
        """Return the layouts of engines that a version goes to, which rank 0 decides."""
        if self._engines is None:
            return await read(self._join, f"version/{version}", list[int])
        chosen = await self._engines.choose()
        if self._world > 1:
            await put(self._join, f"version/{version}", chosen)
        return chosen

    async def _publish(self, version: int, chosen: list[int]) -> PublishReport:
        reports: list[PublishReport] = []
        failures: list[FabricError] = []
        ended = 0

        async def publish(layout: int) -> None:
            nonlocal ended
            try:
                reports.append(await (await self._layouts.publisher(layout)).publish(version))
            except FabricError as error:
                failures.append(error)
            ended += 1
            if ended == len(chosen):
                tasks.cancel_scope.cancel()

        with unwrapped():
            async with anyio.create_task_group() as tasks:
                for layout in chosen:
                    tasks.start_soon(publish, layout)
                if self._engines is not None:
                    tasks.start_soon(self._leave_out_late, version, chosen)
        if self._engines is not None:  # the program may end next, and the other ranks still want to know
            for layout in chosen:
                await self._layouts.coordinators[layout].wait_trainers_informed()
        if not reports:
            raise failures[0]
        return merged(reports, tuple(map(str, failures)))

    async def _leave_out_late(self, version: int, chosen: list[int]) -> None:
        """At rank 0: once a version has waited long enough, let those who are ready for it have it."""
        await anyio.sleep(self._boundary_s)
        reason = f"no step boundary within {self._boundary_s:g} s"
        coordinators = [self._layouts.coordinators[layout] for layout in chosen]
        while True:
            found = [(one, *one.unprepared(version)) for one in coordinators]
            late = [(one, names) for one, _, names in found if names]
            if late and any(ready for _, ready, _ in found):
                for one, names in late:
                    logger.warning("version %d goes on without %s: %s", version, ", ".join(names), reason)
                    one.leave_out(version, names, f"{', '.join(names)}: {reason}")
            await anyio.sleep(LOOK_S)


@asynccontextmanager
async def open_sender(
    named: NamedTensors,
    join: Meeting,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    parts: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
    config: FabricConfig | None = None,
    log: Path | None = None,
    chunk_bytes: int | None = None,
    boundary_s: float = BOUNDARY_S,
) -> AsyncIterator[WeightSender]:
    """Open one rank of a training whose weights engines want; returns when the first engine has joined.

    Engines may differ in ranks, shapes, element types and rules. One whose tensors the parameters do not go into is
    refused by itself, unless it is the first.

    Args:
        named: all parameters of this rank: DTensors as FSDP2 and tensor parallelism make them, or whole tensors.
        join: where the ranks and the engines meet: a Join, the address of a directory, a store of torch.distributed.
        rank: of this process in the training; from torch.distributed where neither this nor `ranks` is given.
        ranks: of the training.
        parts: of plain tensors that are a part: shape of the whole parameter, and where the part begins.
        config: how the fabric is opened; over several hosts name a rail, as `rails=("auto", "tcp:eth0")`.
        log: of rank 0, which decides whether a version serves: what the names of the files of its decisions begin with,
            one for each layout of engines, for a training that goes on after a restart; None keeps them in memory, as
            long as this block lasts.
        chunk_bytes: of rank 0: about the most that one piece writes; None chooses 4 MiB, and 64 MiB for a GPU.
        boundary_s: of rank 0: seconds that a version waits for an engine that reaches no step boundary, while another
            one could take it.

    Raises:
        ValueError: the parameters do not go into the tensors of the first engine; the text names the tensor.
        DeviceError: memory cannot be registered.
        PeerError, BrokenError: the directory refuses this process, or the meeting's store does not answer.

    Cancellation: what was posted drains (INV-2), the memory is released, then it goes on.
    """
    here, world = rank_and_world(rank, ranks)
    if not boundary_s > 0:
        raise ValueError(f"boundary_s must be positive, got {boundary_s}")
    state = tensors_of(named)
    shards = arrays_of(state, here)
    held = holdings(state, here, parts)
    on_gpu = any(isinstance(shard, torch.Tensor) for shard in shards.values())
    most_bytes = chunk_bytes or (GPU_CHUNK_BYTES if on_gpu else CHUNK_BYTES)
    async with AsyncExitStack() as stack:
        met = await stack.enter_async_context(attend(join, serves=here == 0))
        await put_holdings(met, here, held)
        fabric = await stack.enter_async_context(open_fabric(config))
        async with beside() as tasks:
            layouts = Layouts(fabric, met, here, shards, log, tasks)
            if here:
                plan, blueprint = await get_blueprint(met, 0)
                layouts.open(0, plan, blueprint.in_place)
                tasks.start_soon(layouts.follow)
                yield WeightSender(met, layouts, None, world, boundary_s)
                return
            engines = Engines(met, layouts, world, most_bytes, tasks)
            tasks.start_soon(engines.run)
            await engines.wait_first()
            yield WeightSender(met, layouts, engines, world, boundary_s)
