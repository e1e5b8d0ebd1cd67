"""Opening an exchange among GPUs. Runs on the event loop's thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar

import anyio
import anyio.abc
import torch

from asyncfabric import Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.gpu.exchange import CudaMoeExchange
from asyncfabric.moe.gpu.lanes import NodeLanes, cuda_buffer_bytes, lanes_of
from asyncfabric.moe.gpu.layout import NvlinkLayout
from asyncfabric.moe.gpu.node_exchange import CudaNodeExchange
from asyncfabric.moe.gpu.ranks import CudaRankExchange
from asyncfabric.moe.gpu.site import Site, hosts_of
from asyncfabric.moe.gpu.slots import CudaSlotExchange
from asyncfabric.moe.group import MoeGroup

DEADLINE_S = 10.0
ExchangeT = TypeVar("ExchangeT", bound=CudaMoeExchange)


def open_moe_cuda(
    fabric: Fabric,
    group: MoeGroup,
    config: MoeConfig,
    *,
    device: torch.device | str,
    hosts: Sequence[Hashable] | None = None,
    blocks: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> AbstractAsyncContextManager[CudaMoeExchange]:
    """Open an exchange among GPUs, as `async with` does.

    Allocates all memory that it will need and maps that of the other ranks of its host, which must reach each other by
    NVLink or be on one GPU. Ranks of other hosts are reached over the fabric: what goes there is packed in pinned
    memory, and the engine's worker, which then spins, writes it by the kernels' word. Tasks of the exchange submit
    these writes a step ahead, so the event loop has to run: one that is blocked holds the GPUs up. As they live in a
    task group, such an exchange is closed by the task that opened it, before any scope round the opening.

    Args:
        fabric: of this rank, on any rail: ranks meet over its messages, and it reaches the ranks of other hosts.
        group: who takes part; 32 ranks at most, 8 on one host.
        config: equal on all ranks. With node_size above 1, a token crosses to each other node once; each node needs an
            expert then. `private_tokens` rows for each rank of another host leave in one write with the routes, whether
            there are as many or not; the event loop sends what is beyond them.
        device: of this rank, "cuda:0" for example.
        hosts: a name for the host of each rank, grouped alike on all ranks; None: all are on one host.
        blocks: of each launch, each on a multiprocessor of its own; None: as many as there are. All blocks of the ranks
            of one process on one GPU must fit on it at once; processes that share a GPU take turns.
        deadline_s: how long a kernel waits for another rank, in seconds of the GPU's clock; by the nodes up to four
            times as long in the later waits of a step, which are for ranks that may be waiting themselves.

    Raises:
        ValueError: a config, hosts or blocks that the kernels cannot do, or buffers of more than
            config.buffer_limit_bytes.
        BusyError: the fabric has no watch word or counter flag left for ranks of other hosts.
        DeviceError: no memory left, or no GPU that can do it.
        MissingRankError: a rank is lost, or did not open before the caller's deadline.
        RemoteProtocolError: a rank opened with another configuration.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    found, homes = torch.device(device), hosts_of(config.ranks, hosts)
    lanes = lanes_of(config, group.rank // config.node_size) if config.node_size > 1 else None
    layouts = (lanes.across, lanes.inside) if lanes else (NvlinkLayout(config),)
    _check_opening(group, config, found, layouts, blocks, deadline_s, cuda_buffer_bytes(config))
    if lanes is None:
        site = Site(layouts[0], group.rank, found, blocks, deadline_s, homes)
        return _opening([site], lambda tasks: CudaMoeExchange(fabric, group, site, tasks))
    across, inside = (_lane_site(lanes, layout, group.rank, found, blocks, deadline_s, homes) for layout in layouts)
    return _opening([across, inside], lambda tasks: CudaNodeExchange(fabric, group, lanes, (across, inside), tasks))


def open_moe_ranks(
    fabric: Fabric,
    group: MoeGroup,
    config: MoeConfig,
    *,
    device: torch.device | str,
    hosts: Sequence[Hashable] | None = None,
    blocks: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> AbstractAsyncContextManager[CudaRankExchange]:
    """Open an exchange among GPUs whose experts are its ranks: a token goes to each rank once at most.

    A rank has room for `ranks * max_tokens` rows then, where `open_moe_cuda` with the same config has room for all
    choices of a token on one rank, `ranks` times as many. Takes, raises and is cancelled as `open_moe_cuda`, without
    nodes; `num_experts` and `top_k` are the number of ranks. Ranks that open one exchange by different calls do not
    meet: RemoteProtocolError.
    """
    if (config.num_experts, config.top_k, config.node_size) != (config.ranks, config.ranks, 1):
        raise ValueError(
            f"an exchange whose experts are its {config.ranks} ranks has as many experts and choices, and no nodes, got"
            f" num_experts {config.num_experts}, top_k {config.top_k}, node_size {config.node_size}"
        )
    layout = NvlinkLayout(config, most_choices=1)
    site = _checked_site(group, config, layout, device, blocks, deadline_s, hosts)
    return _opening([site], lambda tasks: CudaRankExchange(fabric, group, site, tasks))


def open_moe_slots(
    fabric: Fabric,
    group: MoeGroup,
    config: MoeConfig,
    *,
    device: torch.device | str,
    blocks: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> AbstractAsyncContextManager[CudaSlotExchange]:
    """Open an exchange among the GPUs of one host whose rows lie in slots: `max_tokens` of each rank for each expert.

    Takes, raises and is cancelled as `open_moe_cuda`, without hosts and nodes.
    """
    if config.node_size > 1:
        raise ValueError(f"an exchange with rows in slots has no nodes, got node_size {config.node_size}")
    layout = NvlinkLayout(config, slot_rows=config.ranks * config.max_tokens)
    site = _checked_site(group, config, layout, device, blocks, deadline_s, None)
    return _opening([site], lambda tasks: CudaSlotExchange(fabric, group, site, tasks))


def _checked_site(
    group: MoeGroup,
    config: MoeConfig,
    layout: NvlinkLayout,
    device: torch.device | str,
    blocks: int | None,
    deadline_s: float,
    hosts: Sequence[Hashable] | None,
) -> Site:
    found, homes = torch.device(device), hosts_of(config.ranks, hosts)
    _check_opening(group, config, found, (layout,), blocks, deadline_s, layout.buffer_bytes(0))
    return Site(layout, group.rank, found, blocks, deadline_s, homes)


def _check_opening(
    group: MoeGroup,
    config: MoeConfig,
    found: torch.device,
    layouts: Sequence[NvlinkLayout],
    blocks: int | None,
    deadline_s: float,
    needed: int,
) -> None:
    if len(group.addresses) != config.ranks:
        raise ValueError(f"config.ranks is {config.ranks}, the group has {len(group.addresses)} addresses")
    if found.type != "cuda" or found.index is None:
        raise ValueError(f"device must name a GPU, such as cuda:0, got {found}")
    routers = max(layout.routers for layout in layouts)
    if blocks is not None and blocks <= routers:
        raise ValueError(f"blocks must be more than the {routers} that route, got {blocks}")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s must be more than 0, got {deadline_s}")
    if needed > config.buffer_limit_bytes:
        raise ValueError(
            f"the exchange needs {needed} bytes on each GPU, config.buffer_limit_bytes is {config.buffer_limit_bytes};"
            " raise it, or lower max_tokens or in_flight"
        )


def _lane_site(
    lanes: NodeLanes,
    layout: NvlinkLayout,
    rank: int,
    device: torch.device,
    blocks: int | None,
    deadline_s: float,
    homes: Sequence[int],
) -> Site:
    members = lanes.members(rank, layout)
    hosts = hosts_of(len(members), [homes[member] for member in members])
    return Site(layout, members.index(rank), device, blocks, deadline_s, hosts, members.start, members.step)


@asynccontextmanager
async def _opening(
    sites: Sequence[Site], make: Callable[[anyio.abc.TaskGroup | None], ExchangeT]
) -> AsyncIterator[ExchangeT]:
    failure: Exception | None = None
    far = any(site.far(range(site.layout.config.ranks)) for site in sites)
    # Tasks of the proxy, if there is one; whatever fails beside them is reported as it is, not as a group.
    async with anyio.create_task_group() if far else nullcontext() as tasks:
        moe = make(tasks)
        try:
            async with moe._stack:
                await moe._open()
                try:
                    yield moe
                finally:
                    moe._shut()
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
